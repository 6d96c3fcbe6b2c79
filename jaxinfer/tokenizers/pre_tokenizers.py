"""How byte-level BPE vocabularies cut text into words, by the names that GGUF files give (`tokenizer.ggml.pre`)."""

from tokenizers import Regex, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
_LLAMA3 = (_CL100K % "{1,3}",)
_QWEN2 = (_CL100K % "",)
_SEED_CODER = (_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + _SPACES,)
# Words of one case after the other: capitals and then small letters, at least one of either.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"
_TEKKEN = (_CASED % ("", "") + r"|\p{N}|" + _SYMBOLS + _SPACES,)
_GPT4O = (_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?") + r"|\p{N}{1,3}|" + _SYMBOLS + _SPACES,)
_SINGLE_DIGITS = (r"\p{N}", _GPT2)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")

_GPT2_NAMES = ("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "a.x-4.0", "granite-docling", "mellum", "trillion")
_SINGLE_DIGITS_NAMES = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "midm-2.0", "pixtral")

_SPLITS: dict[str, tuple[str, ...]] = {
    "default": _DEFAULT,
    **dict.fromkeys(_GPT2_NAMES, (_GPT2,)),
    **dict.fromkeys(_SINGLE_DIGITS_NAMES, _SINGLE_DIGITS),
    **dict.fromkeys((*_LLAMA3_NAMES, "dbrx", "smaug-bpe"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "f2llmv2", "kormo", "megrez", "stablelm2"), _QWEN2),
    **dict.fromkeys(("gpt-4o", "kanana2"), _GPT4O),
    "deepseek-coder": _DEEPSEEK_CODER,
    "seed-coder": _SEED_CODER,
    "tekken": _TEKKEN,
}

WHOLE_WORD_NAMES = frozenset({*_LLAMA3_NAMES, "tekken"})
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
