"""What the engine and the front doors need of a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to token ids and back. Ids are ``0 .. vocab_size - 1``, added tokens included.

    Attributes:
        vocab_size: one more than the largest id.
        bos_token_id, eos_token_id, pad_token_id: the named special tokens, None where the model has none.
        all_special_ids: ids that `decode` leaves out under `skip_special_tokens`.
        chat_template: the default Jinja chat template, None when the model came without one.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int | None: ...

    @property
    def all_special_ids(self) -> frozenset[int]: ...

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; special tokens spelled out in it are parsed as such.

        `add_special_tokens` puts BOS (and EOS) where the model's own tokenizer would, but a text that already begins
        with BOS gets no second one.
        """
        ...

    def decode(
        self, token_ids: Sequence[int], skip_special_tokens: bool = False, spaces_between_special_tokens: bool = True
    ) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD, ids outside the vocabulary are left out."""
        ...

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, its leading space kept; U+FFFD for part of a character. Never raises."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tokenize: bool = True,
        **kwargs: Any,
    ) -> list[int] | str:
        """Renders a conversation to token ids, or to text with ``tokenize=False``.

        Raises:
            ValueError: there is no template, the template refuses the conversation, or a message is malformed.
        """
        ...


def check_text(text: str) -> None:
    """Refuses what no tokenizer can read.

    Raises:
        TypeError: not a string.
        ValueError: half of a surrogate pair, which Python and JSON strings can hold but UTF-8 cannot.
    """
    if not isinstance(text, str):
        raise TypeError(f"text must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text holds {text[error.start]!r} at character {error.start}, half of a surrogate pair, which is no "
            'character; leave it out, or replace it with text.encode("utf-8", "replace").decode()'
        ) from None
