"""Several processes that run one engine together: what they have to agree on."""

import hashlib
from collections.abc import Iterable

import jax
import numpy as np

from jaxinfer.sharding.placement import Placement


def agreed_minimum(placement: Placement, value: int) -> int:
    """The least of the values that the processes of an engine have; each of them has to call this.

    Args:
        placement: of the engine.
        value: this process's, 0 to 2**31 - 1.
    """
    if not placement.spans_processes:
        return value
    return int(_from_all(np.array([value], np.int32)).min())


def check_same(placement: Placement, what: str, parts: Iterable[object]) -> None:
    """Raises when the processes of an engine do not say the same, on all of them; each of them has to call this.

    Every process takes the same steps because it has the same requests: where one has others, the devices would wait
    for each other for ever.

    Args:
        placement: of the engine.
        what: is compared, for the error.
        parts: of it; their `repr` is.

    Raises:
        ValueError: they differ.
    """
    if not placement.spans_processes:
        return
    digest = hashlib.sha256("\n".join(map(repr, parts)).encode("utf-8", "surrogatepass")).digest()
    found = _from_all(np.frombuffer(digest, np.int32))
    if (found != found[0]).any():
        others = [place for place, own in enumerate(found) if (own != found[0]).any()]
        raise ValueError(
            f"the processes that run this engine together have different {what}: those of processes "
            f"{', '.join(map(str, others))} are not those of process 0; run the same calls in each"
        )


def _from_all(values: np.ndarray) -> np.ndarray:
    """What every process has, in their order: int32[processes, N]."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(values)).reshape(jax.process_count(), -1)
