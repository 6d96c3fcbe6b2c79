"""A text as windows of tokens that are scored one by one."""

from jaxinfer.tokenizers.tokenizer import Tokenizer


def text_windows(tokenizer: Tokenizer, text: str, window: int) -> list[list[int]]:
    """Consecutive pieces of a text, each a context of its own: no window sees the one before it.

    Where the tokenizer begins a text with a BOS token, every window begins with it.

    Args:
        tokenizer: of the model.
        text: any length.
        window: tokens of a window, BOS included, at least 2. The last window may be shorter.

    Raises:
        ValueError: the text has too few tokens for one to be predicted, or `window` is too small.
    """
    if window < 2:
        raise ValueError(f"window={window} leaves no token to predict from another; give at least 2")
    bos = tokenizer.bos_token_id
    begin = [] if bos is None or tokenizer.encode("")[:1] != [bos] else [bos]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    size = window - len(begin)
    windows = [begin + tokens[first : first + size] for first in range(0, len(tokens), size)]
    windows = [tokens for tokens in windows if len(tokens) > 1]
    if not windows:
        raise ValueError(f"the text has {len(tokens)} tokens; it takes at least 2 to predict one from another")
    return windows
