"""Which modules transformers leaves in floats, by the patterns of a ``quantization_config``."""

import re
from collections.abc import Sequence

ALWAYS = ("lm_head", "embed_tokens")
"""Last names of what transformers leaves alone where a config has no patterns: the output head and tables of tokens."""


def is_skipped(module: str, patterns: Sequence[str] | None) -> bool:
    """Whether a module is not quantised: a pattern is the beginning of its name up to a dot or the end, as text or
    as a regular expression, or its end. None is `ALWAYS`."""
    if patterns is None:
        return module.rsplit(".", 1)[-1] in ALWAYS
    return any(module.endswith(pattern) or _begins(module, pattern) for pattern in patterns)


def checked_patterns(key: str, patterns: object) -> tuple[str, ...] | None:
    """The value of a config's key, as `is_skipped` takes it.

    Raises:
        ValueError: not a list of regular expressions, or None; names the key.
    """
    if patterns is None:
        return None
    if not isinstance(patterns, list | tuple) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"quantization_config has {key}={patterns!r}, which must be a list of modules' names")
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"quantization_config has {key} with {pattern!r}, no regular expression ({error})"
            ) from error
    return tuple(patterns)


def _begins(module: str, pattern: str) -> bool:
    return re.match(rf"(?:{pattern})(?:(?<=\.)|(?=\.|$))", module) is not None
