"""How byte-level BPE vocabularies cut text into words, by the names that GGUF files give (`tokenizer.ggml.pre`)."""

from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (_CL100K % "{1,3}",)
_QWEN2 = (_CL100K % "",)
_SINGLE_DIGITS = (r"\p{N}", _GPT2)
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "mpt", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _SINGLE_DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN2),
}

WHOLE_WORD_NAMES = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"})
"""Vocabularies in which a word that is a token stays whole, whatever the merges say; they begin a text with BOS."""


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """The word splitter of that name: each expression cuts the pieces the one before it left, then bytes are mapped.

    Raises:
        ValueError: the name is not known.
    """
    if name not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre={name!r} is not supported, and another would split text wrongly; known are"
            f" {sorted(_SPLITS)}. Use the model's Hugging Face directory, or pass a tokenizer"
        )
    steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in _SPLITS[name]]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
