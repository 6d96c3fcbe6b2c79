"""Orbax's writing of a tree whose arrays do not exist all at once."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from orbax.checkpoint import type_handlers


class StreamedLeaf:
    """Stands in a tree for an array that will come: its path, shape and dtype."""

    def __init__(self, path: str, spec: Any) -> None:
        self.path = path
        self.shape = tuple(spec.shape)
        self.dtype = np.dtype(spec.dtype)


class StreamHandler(type_handlers.NumpyHandler):
    """Writes StreamedLeaf leaves as numpy arrays, from a stream of their values.

    Args:
        stream: path and values of every leaf.
        batch_bytes: values that are held and written together.
    """

    def __init__(self, stream: Iterable[tuple[str, np.ndarray]], batch_bytes: int) -> None:
        super().__init__(deepcopy_host_arrays=False)
        self._stream = stream
        self._batch_bytes = batch_bytes

    async def serialize(self, values: Sequence[StreamedLeaf], infos: Any, args: Any = None) -> Sequence[Any]:
        """Writes everything before it returns; there is nothing left to wait for."""
        places = {leaf.path: (leaf, info, arg) for leaf, info, arg in zip(values, infos, args, strict=True)}
        for batch in self._batches():
            arrays, at = [], []
            for path, array in batch:
                leaf, *where = places.pop(path)
                if (array.shape, array.dtype) != (leaf.shape, leaf.dtype):
                    raise ValueError(f"{path} is {array.dtype}{array.shape}, not {leaf.dtype}{leaf.shape}")
                arrays.append(array)
                at.append(where)
            for future in await super().serialize(arrays, [info for info, _ in at], [arg for _, arg in at]):
                future.result()
        if places:
            raise ValueError(f"no values for {next(iter(places))!r}")
        return []

    def _batches(self) -> Iterator[list[tuple[str, np.ndarray]]]:
        batch: list[tuple[str, np.ndarray]] = []
        held = 0
        for path, array in self._stream:
            batch.append((path, array))
            held += array.nbytes
            if held >= self._batch_bytes:
                yield batch
                batch, held = [], 0
        if batch:
            yield batch
