"""SamplingParams: how one request is sampled, with vLLM's names, defaults and checks."""

import dataclasses
import enum
import math
import numbers
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.tokenizers.tokenizer import Tokenizer

MAX_SAMPLES = 16384
MIN_TEMPERATURE = 0.01
MAX_SEED = 2**63 - 1
MAX_LOGIT_BIAS = 100.0


class RequestOutputKind(enum.Enum):
    """What every RequestOutput of a request holds: all so far, what is new, or everything once at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(repr=False)
class SamplingParams:
    """How a request is sampled. Values are checked and normalised when the object is made, and again (on a copy) when
    a request is added, so changing a field in between is safe.

    `logprobs` and `prompt_logprobs` are log-softmax values of the raw model logits: temperature, top-k, top-p, min-p,
    penalties, biases and bans do not change them.

    Args:
        n: samples drawn for one prompt, 1 to 16384; above 1 needs temperature > 0.
        presence_penalty: -2 to 2, subtracted once from tokens that the output has.
        frequency_penalty: -2 to 2, subtracted for each occurrence in the output.
        repetition_penalty: > 0; above 1 discourages tokens of the prompt and the output.
        temperature: 0 to 2; 0 is greedy (then top_p, top_k and min_p do not act), and 0 < t < 0.01 is raised to 0.01.
        top_p: in (0, 1].
        top_k: at least 1; 0 or -1 means all tokens, stored as 0.
        min_p: 0 to 1, share of the best token's probability that a token needs.
        seed: 0 to 2**63 - 1, the request's own randomness whatever runs beside it; None or -1 draws a fresh seed.
        stop: text or texts that end the output; not part of it unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the output, also under `ignore_eos`; they stay in the output.
        ignore_eos: go on past every end-of-sequence id of the model (`stop_token_ids` still act).
        max_tokens: most tokens generated, at least 1; None means as many as the model's length allows.
        min_tokens: no end-of-sequence id, stop token or stop text acts before this many tokens exist.
        logprobs: alternatives returned for each token, beside the sampled one; -1 means the whole vocabulary.
        prompt_logprobs: the same for the prompt's tokens.
        detokenize: turn the ids into text.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: put spaces between special tokens when they are kept.
        include_stop_str_in_output: keep the stop text that ended the output.
        output_kind: what each RequestOutput of a stream holds.
        stream_interval: tokens between two outputs of a stream, at least 1; None means 1.
        logit_bias: added to the logits of these ids, clamped to [-100, 100].
        allowed_token_ids: only these ids may be generated.
        bad_words: words that must not appear, whether they start the text or follow a space.
        skip_reading_prefix_cache: compute the whole prompt even where the prefix cache has it; None does so only with
            `prompt_logprobs`, which need all of its logits (and False is refused then).

    The remaining fields are vLLM's for features that are not built; they are refused unless left at their default.

    Raises:
        ValueError: a value is out of range, contradicts another, or asks for something that is not built.
        TypeError: a value has the wrong type.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: Sequence[str] = ()
    skip_reading_prefix_cache: bool | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: Any = None
    logprob_token_ids: Any = None
    flat_logprobs: Any = False
    skip_clone: Any = False
    structured_outputs: Any = None
    extra_args: Any = None
    thinking_token_budget: Any = None
    repetition_detection: Any = None
    routed_experts_prompt_start: Any = 0
    trace_decode_token_ids: Any = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        self._refuse_unbuilt()
        self._normalise_flags()
        self._normalise_numbers()
        self._normalise_lengths()
        self._normalise_texts()
        self._normalise_ids()
        if self.is_greedy:
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
            if self.n > 1:
                raise ValueError(
                    f"n={self.n} with temperature=0 would give the same text {self.n} times; "
                    "set n=1 or a temperature above 0"
                )

    def _refuse_unbuilt(self) -> None:
        for item in _UNBUILT_FIELDS:
            value = getattr(self, item.name)
            if value is not item.default and value != item.default:
                raise ValueError(
                    f"{item.name}={value!r} is not supported by jaxinfer yet; leave it at {item.default!r}"
                )

    def _normalise_flags(self) -> None:
        for name in _FLAG_FIELDS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        skip = self.skip_reading_prefix_cache
        if skip is not None and not isinstance(skip, bool):
            raise TypeError(f"skip_reading_prefix_cache={skip!r} must be True, False or None")
        if skip is False and self.prompt_logprobs is not None:
            raise ValueError(
                "skip_reading_prefix_cache=False contradicts prompt_logprobs, which need the logits of the whole "
                "prompt; leave it at None"
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind={self.output_kind!r} must be a RequestOutputKind")

    def _normalise_numbers(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            setattr(self, name, _number(name, getattr(self, name), -2.0, 2.0))
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if not 0.0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} must be above 0 and finite; 1 switches it off"
            )
        self.temperature = _number("temperature", self.temperature, 0.0, 2.0)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            warnings.warn(
                f"temperature={self.temperature} is raised to {MIN_TEMPERATURE}; use 0 for greedy sampling",
                stacklevel=4,
            )
            self.temperature = MIN_TEMPERATURE
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValueError("top_p=0.0 must be above 0 and at most 1; 1 switches it off, temperature=0 is greedy")
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        self.top_k = _integer("top_k", self.top_k, low=-1, hint="0 or -1 means all tokens")
        self.top_k = max(self.top_k, 0)

    def _normalise_lengths(self) -> None:
        self.n = _integer("n", self.n, low=1, high=MAX_SAMPLES)
        if self.seed is not None:
            self.seed = _integer("seed", self.seed, low=-1, high=MAX_SEED, hint="None or -1 draws a fresh seed")
            self.seed = None if self.seed == -1 else self.seed
        if self.max_tokens is not None:
            hint = "None means as many as the model's length allows"
            self.max_tokens = _integer("max_tokens", self.max_tokens, low=1, hint=hint)
        self.min_tokens = _integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}; lower the one or raise the other"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                hint = "-1 means the whole vocabulary, None none at all"
                setattr(self, name, _integer(name, getattr(self, name), low=-1, hint=hint))
        if self.stream_interval is not None:
            self.stream_interval = _integer("stream_interval", self.stream_interval, low=1)

    def _normalise_texts(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else _texts("stop", self.stop)
        self.bad_words = _texts("bad_words", self.bad_words)
        for name in ("stop", "bad_words"):
            if "" in getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r} holds an empty string; remove it")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs detokenize=True; use stop_token_ids to stop without text")

    def _normalise_ids(self) -> None:
        self.stop_token_ids = _ids("stop_token_ids", self.stop_token_ids or ())
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids=[] allows no token at all; give some ids, or None for all")
        if self.logit_bias is not None:
            self.logit_bias = _biases(self.logit_bias)

    @property
    def reads_cache(self) -> bool:
        """A request may take blocks from the prefix cache; by default not if its prompt is scored, which needs every
        logit."""
        skips = self.skip_reading_prefix_cache
        return not (self.prompt_logprobs is not None if skips is None else skips)

    @property
    def is_greedy(self) -> bool:
        """The token with the largest (adjusted) logit is taken."""
        return self.temperature == 0.0

    @property
    def needs_sampler(self) -> bool:
        """Anything beyond a plain argmax is asked for."""
        return not (
            self.is_greedy
            and self.presence_penalty == 0.0
            and self.frequency_penalty == 0.0
            and self.repetition_penalty == 1.0
            and not self.logit_bias
            and self.allowed_token_ids is None
            and not self.bad_words
            and self.min_tokens == 0
            and self.logprobs is None
            and self.prompt_logprobs is None
        )

    def clone(self) -> "SamplingParams":
        """A checked copy that shares no container with this one."""
        return dataclasses.replace(self)

    def with_bad_words(self, tokenizer: "Tokenizer") -> "SamplingParams":
        """A copy with `bad_words_token_ids` filled: of each word, the ids with and without a space before it.

        Raises:
            ValueError: a word has no tokens.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in self.bad_words:
            spellings = _spellings(word, tokenizer)
            if not spellings:
                raise ValueError(f"bad_words holds {word!r}, which the tokenizer turns into no tokens; remove it")
            sequences.update(dict.fromkeys(spellings))
        # A sequence that ends in another banned one adds nothing; several tokens cost more than one to watch for.
        kept = [ids for ids in sequences if not any(ids[start:] in sequences for start in range(1, len(ids)))]
        return dataclasses.replace(self, bad_words_token_ids=tuple(kept))

    def check_model(self, vocab_size: int, max_logprobs: int, eos_token_ids: frozenset[int]) -> None:
        """Checks what depends on the model: ids, number of logprobs, and that some token may come first.

        Args:
            vocab_size: V; ids are 0 to V - 1.
            max_logprobs: most alternatives per token, -1 for V. `logprobs=-1` is always allowed.
            eos_token_ids: ids that end this request (none under `ignore_eos`).

        Raises:
            ValueError: naming the field.
        """
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            outside = [token for token in getattr(self, name) or () if not 0 <= token < vocab_size]
            if outside:
                raise ValueError(f"{name} holds {outside[0]}, outside the vocabulary's ids 0 to {vocab_size - 1}")
        limit = vocab_size if max_logprobs == -1 else min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            if asked is not None and asked > limit:
                raise ValueError(
                    f"{name}={asked} exceeds the limit of {limit}; ask for fewer, give {name}=-1 for the whole "
                    "vocabulary, or raise max_logprobs when the engine is made"
                )
        if self.allowed_token_ids is not None:
            banned = {ids[0] for ids in self.bad_words_token_ids if len(ids) == 1}
            if self.min_tokens > 0:
                banned |= eos_token_ids.union(self.stop_token_ids)
            if banned.issuperset(self.allowed_token_ids):
                raise ValueError(
                    f"allowed_token_ids={self.allowed_token_ids} are all banned by bad_words={self.bad_words} or "
                    f"min_tokens={self.min_tokens}: no token could be generated"
                )

    def __repr__(self) -> str:
        """Only what differs from the default."""
        changed = []
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name != "bad_words_token_ids" and value != item.default and value != []:
                changed.append(f"{item.name}={value!r}")
        return f"SamplingParams({', '.join(changed)})"


_UNBUILT_FIELDS = tuple(item for item in dataclasses.fields(SamplingParams) if item.type is Any)
_FLAG_FIELDS = tuple(item.name for item in dataclasses.fields(SamplingParams) if item.type is bool)


def _float(value: Any) -> float:
    """JSON can hold an int that no float can; it is infinite here."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a number")
    number = _float(value)
    if not low <= number <= high:
        raise ValueError(f"{name}={value} must be from {low:g} to {high:g}")
    return number


def _integer(name: str, value: Any, low: int, high: int | None = None, hint: str = "") -> int:
    hint = f" ({hint})" if hint else ""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name}={value!r} must be an int{hint}")
    number = int(value)
    if number < low or (high is not None and number > high):
        span = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"{name}={value} must be {span}{hint}")
    return number


def _texts(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r} must be a list of strings")
    texts = list(value)
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"{name} holds {text!r}; every entry must be a string")
    return texts


def _ids(name: str, value: Any) -> list[int]:
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r} must be a list of token ids")
    ids = list(value)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise TypeError(f"{name} holds {token!r}; every entry must be an int token id")
    return [int(token) for token in ids]


def _biases(value: Any) -> dict[int, float]:
    """Ids may be decimal strings, as in JSON."""
    if not isinstance(value, Mapping):
        raise TypeError(f"logit_bias={value!r} must map token ids to numbers")
    biases = {}
    for token, bias in value.items():
        if isinstance(token, str) and token.removeprefix("-").isdecimal():
            token = int(token)
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise TypeError(f"logit_bias has the key {token!r}; every key must be an int token id")
        number = _number(f"logit_bias[{token}]", bias, -math.inf, math.inf)
        biases[int(token)] = min(max(number, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)
    return biases


def _spellings(word: str, tokenizer: "Tokenizer") -> list[tuple[int, ...]]:
    """The ids of a word at the start of a text, after a space, and right after other text.

    The last matters where the tokenizer itself puts a space before every text (sentencepiece): there the ids of the
    bare word are those that follow a line break.
    """
    bare = word.lstrip(" ") or word
    found = [tokenizer.encode(bare, add_special_tokens=False), tokenizer.encode(" " + bare, add_special_tokens=False)]
    lead = tokenizer.encode("\n", add_special_tokens=False)
    after = tokenizer.encode("\n" + bare, add_special_tokens=False)
    if after[: len(lead)] == lead:
        found.append(after[len(lead) :])
    return list(dict.fromkeys(tuple(ids) for ids in found if ids))
