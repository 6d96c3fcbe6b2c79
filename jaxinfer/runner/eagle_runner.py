"""EagleRunner: runs the EAGLE draft loop on the target's pool."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import EagleTree
from jaxinfer.engine.plan import ScheduledRow
from jaxinfer.engine.request import Request
from jaxinfer.runner.buckets import bucket_for
from jaxinfer.runner.eagle_loop import LoopInput, make_eagle_loop
from jaxinfer.runner.inputs import BlockTables
from jaxinfer.runner.programs import gpu_options, table_width
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.typing import Params
from pallas_kernels.dispatch import current_device

GROWTH = 8
"""The loop is compiled for one request, for so many, for the square of it, and so on to the largest batch."""


class EagleTrees(NamedTuple):
    """Guesses for B requests, N nodes each, best first: no node is before its parent.

    Attributes:
        token_ids: int32[B, N].
        parents: int32[B, N], places of the nodes before them, -1 for a request's last token.
        logprobs: float32[B, N], logarithms of the head's probability of all tokens up to the node.
    """

    token_ids: np.ndarray
    parents: np.ndarray
    logprobs: np.ndarray


class EagleRunner:
    """The loop for every batch size, warmed and counted.

    A tree grows behind the last token of its request, first in the request's own block, then in blocks that only the
    head's layer has: they belong to no request, and nothing in them outlives a call.

    Args:
        runner: of the target; its pool has the head's layer.
        tree: what is guessed.

    Raises:
        ValueError: the runner has no head (`ModelRunner.use_eagle`).
    """

    def __init__(self, runner: ModelRunner, tree: EagleTree) -> None:
        config = runner.config
        if runner.eagle is None or config.speculation is None:
            raise ValueError("the runner has no EAGLE head: give it one with use_eagle")
        self._runner = runner
        self._tree = tree
        self._size = config.cache.block_size
        self._first_spare = config.cache.num_blocks
        self._num_spare = tree.spare_blocks(self._size)
        self._width = table_width(config) + self._num_spare
        seqs = config.scheduler.max_num_seqs
        self._tables = BlockTables(seqs, table_width(config), -(-tree.num_kept // self._size))
        self._buckets = loop_buckets(min(config.speculation.max_running, seqs))
        self._programs: dict[int, jax.stages.Compiled] = {}

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far; does not move after `warm_up`."""
        return len(self._programs)

    def warm_up(self, progress: bool = False) -> None:
        """Compiles the loop for every batch size, or loads it from the persistent cache."""
        from jaxinfer.progress_bar import ProgressBar

        for size in ProgressBar(self._buckets, desc="Compiling EAGLE loops", disable=not progress):
            self._program(size)

    def draft(self, requests: Sequence[Request]) -> EagleTrees:
        """Guesses for requests that lack their last token only, which is known. Waits for them."""
        rows = tuple(ScheduledRow(request, request.num_known_tokens - 1, 1, True) for request in requests)
        self._tables.update(rows)
        size = bucket_for(len(rows), self._buckets)
        packed = self._runner.placement.put(self._assemble(rows, size))
        output = self._program(size)(self._leaves(), self._runner.kv, packed)
        self._runner.kv = output.kv
        found = np.asarray(output.packed)[: len(rows)]
        return EagleTrees(found[:, 0], found[:, 1], found[:, 2].view(np.float32))

    def take_params(self) -> tuple[jax.Array, ...]:
        """The leaves of the head's parameters, which it lets go of: nothing is computed before it gets others."""
        return self._runner.take_eagle()

    def update_params(self, params: Params) -> None:
        """Takes other parameters for the head, of the same tree, shapes and dtypes."""
        eagle = self._runner.eagle
        assert eagle is not None
        self._runner.use_eagle(eagle.model, params)

    def _assemble(self, rows: Sequence[ScheduledRow], size: int) -> np.ndarray:
        packed = np.zeros(size * (2 + self._width), np.int32)
        given = LoopInput.unpack(packed, size, self._width)
        given.context_lens[:] = 1
        for index, row in enumerate(rows):
            request, known = row.request, row.start + 1
            filled = -(-known // self._size)
            given.tokens[index] = request.token_ids(row.start, known)[0]
            given.context_lens[index] = known
            given.block_tables[index, :filled] = self._tables.tables[request.slot, :filled]
            spare = self._first_spare + index * self._num_spare
            given.block_tables[index, filled : filled + self._num_spare] = np.arange(spare, spare + self._num_spare)
        return packed

    def _leaves(self) -> tuple[jax.Array, ...]:
        eagle = self._runner.eagle
        assert eagle is not None
        return (*jax.tree.leaves(eagle.params), *jax.tree.leaves(self._runner.token_params))

    def _program(self, size: int) -> jax.stages.Compiled:
        program = self._programs.get(size)
        if program is None:
            program = self._programs[size] = self._lower(size).compile()
        return program

    def _lower(self, size: int) -> jax.stages.Lowered:
        eagle, runner = self._runner.eagle, self._runner
        assert eagle is not None
        trees = jax.tree.structure(eagle.params), jax.tree.structure(runner.token_params)
        loop = make_eagle_loop(
            eagle.model, trees, self._tree, num_rows=size, table_width=self._width, block_size=self._size
        )
        options = gpu_options(runner.token_params) if current_device().platform == "gpu" else None
        shapes = jax.tree.map(runner.placement.shape, (self._leaves(), runner.kv))
        packed = jax.ShapeDtypeStruct((size * (2 + self._width),), jnp.int32)
        return jax.jit(loop, donate_argnums=1, compiler_options=options).lower(*shapes, packed)


def loop_buckets(largest: int) -> tuple[int, ...]:
    """Batch sizes that are compiled, ascending, the last being `largest`; one not far below that is left out."""
    sizes, size = [], 1
    while size == 1 < largest or 2 * size < largest:
        sizes.append(size)
        size *= GROWTH
    return (*sizes, largest)
