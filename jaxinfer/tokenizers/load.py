"""Finding the tokenizer that belongs to a checkpoint."""

from pathlib import Path

from jaxinfer.tokenizers.gguf import GGUFTokenizer
from jaxinfer.tokenizers.hf import HFTokenizer
from jaxinfer.tokenizers.sentencepiece import SentencePieceTokenizer
from jaxinfer.tokenizers.tokenizer import Tokenizer

# What other libraries make a tokenizer of, by code that belongs to the model's class.
_UNREAD = ("tekken.json", "vocab.json", "vocab.txt", "*.tiktoken")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a GGUF file or of a Hugging Face directory (tokenizer.json before tokenizer.model).

    Raises:
        ValueError: there is none, or it is damaged; names the path.
    """
    path = Path(path)
    if path.is_file() and path.suffix == ".gguf":
        from jaxinfer.checkpoint.gguf import read_gguf  # its package imports JAX, which a directory does not need

        return GGUFTokenizer.from_metadata(read_gguf(path).metadata)
    if not path.is_dir():
        raise ValueError(f"tokenizer={str(path)!r} must be a directory with tokenizer files or a .gguf file")
    if (path / "tokenizer.json").is_file():
        return HFTokenizer.from_dir(path)
    if (path / "tokenizer.model").is_file():
        return SentencePieceTokenizer.from_dir(path)
    unread = sorted(file.name for pattern in _UNREAD for file in path.glob(pattern))
    others = f" ({', '.join(unread)}, which it has, cannot be read alone)" if unread else ""
    raise ValueError(f"{path} has neither tokenizer.json nor tokenizer.model{others}; add one")
