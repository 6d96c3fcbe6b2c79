"""DraftRunner: runs a draft model's steps on the device and owns what they need there."""

from collections.abc import Sequence

import jax

from jaxinfer.cache.paged import KVCache, init_kv_cache
from jaxinfer.config import EngineConfig
from jaxinfer.engine.plan import ScheduledRow
from jaxinfer.runner.draft_programs import DraftPrograms
from jaxinfer.runner.draft_step import DraftState, init_draft_state
from jaxinfer.runner.inputs import BlockTables, assemble
from jaxinfer.runner.programs import table_width
from jaxinfer.sampling.draft_slots import DraftSlots
from jaxinfer.sharding.placement import Placement
from jaxinfer.typing import Params


class DraftRunner:
    """A pool of its own, laid out like the target's and addressed by the same block tables.

    Args:
        config: the engine's settings with the draft's model in place of the target's.
        params: the draft's parameter tree.
        vocab_size: V of the target.
        placement: where everything lies; None is JAX's default device. On a mesh the draft lies whole on each device.
    """

    def __init__(
        self, config: EngineConfig, params: Params, vocab_size: int, placement: Placement | None = None
    ) -> None:
        speculation = config.speculation
        if speculation is None:
            raise ValueError("config.speculation=None: a draft model needs to know how far ahead it guesses")
        self.config = config
        self._placement = placement or Placement()
        self._vocab_size = vocab_size
        self._num_tokens = speculation.num_tokens
        self._num_places = config.max_draft_rows
        self._kv, self._state = self._empty()
        self.update_params(params)
        seqs = config.scheduler.max_num_seqs
        self._tables = BlockTables(seqs, table_width(config), -(-self._num_tokens // config.cache.block_size))
        self._slots = DraftSlots(seqs)
        self._programs = DraftPrograms(config, vocab_size, params, self._kv, self._state, self._placement)

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far; does not move after `warm_up`."""
        return self._programs.num_compiled

    @property
    def drafted(self) -> jax.Array:
        """float32[D, V]: the distributions of the latest drafts. Token j of lane i is at i * K + j."""
        return self._state.drafted

    def warm_up(self, progress: bool = False) -> None:
        """Compiles every program it will ever run, or loads it from the persistent cache."""
        self._programs.compile_all(progress)

    def execute(self, rows: Sequence[ScheduledRow], lanes: Sequence[int], index: int) -> jax.Array:
        """Dispatches a step without waiting for it.

        Args:
            rows: of the step; their requests' blocks hold all their tokens.
            lanes: for each row that draws, where its distribution is kept.
            index: which token of the draft is drawn.

        Returns:
            int32[R], the drawn tokens of the rows that draw, in their order, then padding; on its way to the host.
        """
        plan = tuple(rows)
        self._tables.update(plan)
        sampler = any(row.samples and not row.request.params.is_greedy for row in plan)
        spec = self._programs.spec(sum(row.num_tokens for row in plan), sampler)
        places = [lane * self._num_tokens + index for lane in lanes]
        sampling = self._slots.prepare(plan, places, spec.num_rows)
        packed = assemble(plan, spec, self._tables, self.config.cache.block_size, sampling if sampler else sampling[:1])
        sent = self._placement.put(packed)
        output = self._programs.step(spec)(self._leaves, self._kv, self._state, sent)
        self._kv, self._state = output.kv, output.state
        output.tokens.copy_to_host_async()
        return output.tokens

    def update_params(self, params: Params) -> None:
        """Uses other weights of the same tree, shapes and dtypes from the next step on."""
        self._leaves = tuple(self._placement.put(jax.tree.leaves(params)))

    def take_params(self) -> tuple[jax.Array, ...]:
        """The weights' leaves, which it lets go of: no step is executed before it gets others."""
        leaves, self._leaves = self._leaves, ()
        return leaves

    def release(self) -> None:
        """Frees pool and state; nothing is executed before `restore`. The parameters stay."""
        for leaf in jax.tree.leaves((self._kv, self._state)):
            leaf.delete()

    def restore(self) -> None:
        """Makes an empty pool and state.

        Raises:
            ValueError: the device has no room for the pool.
        """
        self._kv, self._state = self._empty()

    def _empty(self) -> tuple[KVCache, DraftState]:
        config, everywhere = self.config, self._placement.sharding()
        cache = config.cache
        kv = init_kv_cache(config.model, cache.num_blocks, cache.block_size, config.kv_dtype, sharding=everywhere)
        return kv, init_draft_state(config.scheduler.max_num_seqs, self._num_places, self._vocab_size, everywhere)
