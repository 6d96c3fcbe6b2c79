"""What becomes of running requests when something changes under them."""

from typing import Literal, get_args

UpdateMode = Literal["keep", "abort", "wait"]


def checked_mode(mode: str) -> str:
    """The mode; ValueError when it is none of `UpdateMode`."""
    if mode not in get_args(UpdateMode):
        raise ValueError(
            f"mode={mode!r} must be 'keep' (running requests go on), 'abort' (they end now) or 'wait' (they finish "
            "first)"
        )
    return mode
