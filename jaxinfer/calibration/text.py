"""What is run through a model to see its activations."""

from importlib.resources import files
from pathlib import Path

import numpy as np

from jaxinfer.tokenizers.tokenizer import Tokenizer

BUILTIN = "builtin"


def calibration_text(source: str | Path = BUILTIN) -> str:
    """A UTF-8 file's text; for "builtin" that of the package.

    The package's is about 157 kB of English prose in the public domain, a piece each of Austen's Pride and Prejudice
    (1813), Carroll's Alice (1865), Hamilton's first Federalist Papers (1788), Doyle's Scandal in Bohemia (1891),
    Bierce's Devil's Dictionary (1911), Wells's Time Machine (1895) and Walton's Compleat Angler (1653).

    Raises:
        ValueError: the file is no UTF-8, by name, or there is none.
        OSError: it cannot be read.
    """
    if source == BUILTIN:
        return (files("jaxinfer.calibration") / "texts" / "prose.txt").read_text(encoding="utf-8")
    try:
        return Path(source).read_text(encoding="utf-8")
    except (FileNotFoundError, IsADirectoryError):
        raise ValueError(f"calibration={str(source)!r} is no file; give one with text in UTF-8, or 'builtin'") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"the calibration text {source} is not UTF-8 ({error.reason} at byte {error.start})") from None


def calibration_samples(tokenizer: Tokenizer, text: str, samples: int, seq_len: int) -> np.ndarray:
    """Pieces of a text that begin at equal distances, the first at its beginning and the last ending with it.

    They overlap where the text has fewer than ``samples * seq_len`` tokens. Where the tokenizer begins a text with a
    BOS token, every piece begins with it.

    Args:
        tokenizer: of the model.
        text: what to cut.
        samples: how many pieces, at least 1.
        seq_len: tokens of a piece, BOS included, at least 2.

    Returns:
        int32[samples, seq_len].

    Raises:
        ValueError: a number is out of range, or the text is shorter than one piece.
    """
    if samples < 1:
        raise ValueError(f"samples={samples} must be at least 1")
    if seq_len < 2:
        raise ValueError(f"seq_len={seq_len} must be at least 2")
    bos = tokenizer.bos_token_id
    begin = [] if bos is None or tokenizer.encode("")[:1] != [bos] else [bos]
    tokens = np.array(tokenizer.encode(text, add_special_tokens=False), np.int32)
    size = seq_len - len(begin)
    if len(tokens) < size:
        raise ValueError(
            f"the calibration text has {len(tokens)} tokens, fewer than seq_len={seq_len}; give a longer text or a "
            "smaller seq_len"
        )
    starts = np.linspace(0, len(tokens) - size, samples).astype(np.int64)
    pieces = tokens[starts[:, None] + np.arange(size)]
    return np.concatenate([np.tile(np.array(begin, np.int32), (samples, 1)), pieces], axis=1)
