"""Whole numbers as people write them."""

import argparse
import re

_FORM = re.compile(r"(-?\d[\d_]*)(\.\d+)?([kmgtKMGT]?)")
_POWER = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class HumanIntError(argparse.ArgumentTypeError, ValueError):
    """Not a whole number. argparse prints its message, where it would hide that of another ValueError."""


def human_int(text: str) -> int:
    """`4096`, `32K`, `25.6k`, `1M`: a lower-case suffix counts in thousands, an upper-case one in 1024s (as in vLLM).

    Raises:
        HumanIntError: anything else, a fraction of a whole number included.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise HumanIntError(f"{text!r} is not a whole number such as 4096, 32K (32 * 1024) or 25.6k (25600)")
    whole, fraction, suffix = match[1], match[2] or "", match[3]
    scale = (1024 if suffix.isupper() else 1000) ** _POWER[suffix.lower()]
    if fraction and (suffix.isupper() or not suffix):
        raise HumanIntError(f"{text!r}: a fraction needs a lower-case suffix, as in 25.6k; 32K is 32 * 1024")
    digits = fraction.removeprefix(".")
    number, rest = divmod(int(whole + digits) * scale, 10 ** len(digits))
    if rest:
        raise HumanIntError(f"{text!r} is not a whole number")
    return number
