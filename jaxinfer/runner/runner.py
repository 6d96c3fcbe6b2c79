"""ModelRunner: executes plans on the device and owns everything that lives there."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer.cache.paged import KVCache, init_kv_cache
from jaxinfer.config import EngineConfig
from jaxinfer.engine.plan import StepPlan, StepResult
from jaxinfer.models.eagle_model import EagleModel
from jaxinfer.runner.block_copies import copy_calls
from jaxinfer.runner.eagle_step import EagleHead
from jaxinfer.runner.inputs import BlockTables, assemble
from jaxinfer.runner.programs import Programs, table_width
from jaxinfer.runner.results import StepArrays, read_rows
from jaxinfer.runner.slot_moves import move_calls
from jaxinfer.sampling.slots import SlotTable, count_calls
from jaxinfer.sampling.state import SamplingState, init_state
from jaxinfer.sharding.placement import Placement, put_array
from jaxinfer.sharding.shards import Shards, shards_of
from jaxinfer.typing import Params

TOKEN_PARAMS = ("embed", "embed_positions", "lm_head")


class ModelRunner:
    """Runs steps where its placement says (the engine's `Runner`).

    Steps are dispatched without waiting. One transfer goes in and one comes out a step; the pool and the sampling state
    are donated from step to step and never copied.

    Args:
        config: the engine's settings.
        params: the decoder's parameter tree (see `jaxinfer.models.decoder.param_shapes`), arranged as `shards` has it.
            Arrays that lie where they belong are used without a copy, others are copied there.
        shards: how the model lies on which devices; None is whole on JAX's default device.
    """

    def __init__(self, config: EngineConfig, params: Params, shards: Shards | None = None) -> None:
        self.config = config
        self.shards = shards or shards_of(config.model, Placement())
        where = self.shards.placement
        self._targets = [where.sharding(spec) for spec in jax.tree.leaves(self.shards.tree_specs(params))]
        model, scheduler = config.model, config.scheduler
        self.kv, self._state = self._empty()
        """The pool. Whoever has a program of its own change it puts what that returns here."""
        self._leaves: tuple[jax.Array, ...] = ()
        self.token_params: Params = {}
        """Of the parameters those that turn tokens into numbers and back, as the next step reads them."""
        self._take(params)
        guess = config.speculation
        depth, keeps = (guess.depth, guess.keeps_probabilities) if guess else (0, False)
        draft_blocks = -(-guess.num_tokens // config.cache.block_size) if guess else 0
        self._tables = BlockTables(scheduler.max_num_seqs, table_width(config), draft_blocks)
        custom = bool(config.runner.logits_processors)
        is_typical = guess is not None and guess.typical is not None
        self._slots = SlotTable(scheduler.max_num_seqs, model.vocab_size, custom, depth, keeps, is_typical)
        self._programs = Programs(config, params, self.kv, self._state, self.shards)
        self._head_leaves: tuple[jax.Array, ...] = ()
        self._last_ready = 0.0
        self.drafted: Callable[[], jax.Array] | None = None
        """Where drafts may be drawn, gives `DraftRows.drafted` of those that the next step verifies."""

    @property
    def placement(self) -> Placement:
        """The devices that everything lies on."""
        return self.shards.placement

    @property
    def eagle(self) -> EagleHead | None:
        """The EAGLE head that its steps keep up with their tokens, if the pool has its layer."""
        return self._programs.eagle

    def use_eagle(self, model: EagleModel, params: Params) -> None:
        """Takes a head; to be called before anything is compiled, and then with other parameters of the same tree.

        Args:
            model: head and target.
            params: the head's, see `EagleModel`.
        """
        self._programs.eagle = EagleHead(model, self.placement.put(params))
        self._head_leaves = tuple(jax.tree.leaves(self._programs.eagle.params))

    def take_eagle(self) -> tuple[jax.Array, ...]:
        """The leaves of the head's parameters, which the runner lets go of: no step is executed before it gets others
        by `use_eagle`."""
        eagle = self.eagle
        leaves, self._head_leaves = self._head_leaves, ()
        if eagle is not None:
            shapes = jax.tree.map(self.placement.shape, eagle.params)
            self._programs.eagle = EagleHead(eagle.model, shapes)
        return leaves

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far; does not move after `warm_up`."""
        return self._programs.num_compiled

    def warm_up(self, progress: bool = False) -> None:
        """Compiles every program this engine will ever run, or loads it from the persistent cache."""
        self._programs.compile_all(progress)

    def change(self, copies: Sequence[tuple[int, int]], moves: Sequence[tuple[int, int]]) -> None:
        """Changes the pool as `StepPlan` has it: first the moves of slots, then the copies of blocks."""
        for moved in move_calls(moves):
            self.kv = self._programs.move()(self.kv, moved)
        for source_ids, target_ids in copy_calls(copies):
            self.kv = self._programs.copy()(self.kv, source_ids, target_ids)

    def execute(self, plan: StepPlan) -> "DeviceStep":
        """Dispatches a step without waiting for it."""
        started = time.perf_counter()
        self._tables.update(plan.rows)
        num_logits = sum(row.num_logits for row in plan.rows)
        greedy = self._programs.spec(plan.num_tokens, False, num_logits, plan.has_drafts)
        inputs = self._slots.prepare(plan.rows, greedy.num_logits or greedy.num_rows)
        counts = num_logits, plan.has_drafts
        spec = self._programs.spec(plan.num_tokens, True, *counts) if inputs.needs_sampler else greedy
        sampling = inputs.packed if spec.sampler else inputs.packed[:1]
        packed = assemble(plan.rows, spec, self._tables, self.config.cache.block_size, sampling)
        for kind, uploads in (("bias", inputs.bias_uploads), ("counts", inputs.counts_uploads)):
            for slot, row in uploads:
                self._state = self._programs.upload(kind)(self._state, np.int32(slot), row)
        for slots, token_ids in count_calls(inputs.counted, self.config.scheduler.max_num_seqs):
            self._state = self._programs.count()(self._state, slots, token_ids)
        self.change(plan.copies, plan.moves)
        extras: tuple[Any, ...] = ()
        if spec.keeps_probabilities and self.drafted is not None:
            extras = (self.drafted(),)
        elif self.eagle is not None:
            extras = (None, self._head_leaves)
        output = self._programs.step(spec)(self._leaves, self.kv, self._state, self._send(packed), *extras)
        self.kv, self._state = output.kv, output.state
        output.packed.copy_to_host_async()
        arrays = StepArrays(output.packed, output.logits, spec.sampler, self._programs.num_logprobs)
        return DeviceStep(self, plan, arrays, started)

    def update_params(self, params: Params) -> None:
        """Uses other parameters from the next step on, of the same tree, shapes and dtypes (`match_params` checks).
        No compilation, and no copy of arrays that are on the engine's device.
        """
        self._take(params)

    def placed(self, params: Params) -> Params:
        """Parameters where they belong; leaves that are there stay the same arrays."""
        leaves, tree = jax.tree.flatten(params)
        placed: Params = jax.tree.unflatten(tree, list(map(put_array, leaves, self._targets)))
        return placed

    @property
    def leaves(self) -> tuple[jax.Array, ...]:
        """The parameters' leaves."""
        return self._leaves

    def release_kv(self) -> None:
        """Frees the pool and the sampling state. No step may be in flight, and none is executed before `restore_kv`;
        the requests that go on then are ones that have been preempted."""
        for leaf in jax.tree.leaves((self.kv, self._state)):
            leaf.delete()

    def restore_kv(self) -> None:
        """Makes an empty pool and sampling state of the same sizes, which the compiled programs go on with.

        Raises:
            ValueError: the device has no room for the pool.
        """
        self.kv, self._state = self._empty()

    def take_params(self) -> tuple[jax.Array, ...]:
        """The parameters' leaves, which the runner lets go of: no step is executed before it gets others."""
        leaves, self._leaves = self._leaves, ()
        self.token_params = {}
        return leaves

    def shutdown(self) -> None:
        """Frees the pool and the state, and lets go of the parameters, which are the caller's."""
        self.release_kv()
        self.take_params()

    def _empty(self) -> tuple[KVCache, SamplingState]:
        config, cache, placement = self.config, self.config.cache, self.shards.placement
        sizes = cache.num_blocks, cache.block_size, config.kv_dtype
        places = placement.sharding(self.shards.pool_spec), placement.sharding()
        kv = init_kv_cache(self.shards.split.padded, *sizes, config.features, *places)
        return kv, init_state(config.scheduler.max_num_seqs, config.model.vocab_size, placement.sharding())

    def _take(self, params: Params) -> None:
        placed = self.placed(params)
        self._leaves = tuple(jax.tree.leaves(placed))
        self.token_params = {name: placed[name] for name in TOKEN_PARAMS if name in placed}

    def _send(self, packed: np.ndarray) -> jax.Array:
        return put_array(packed, self.placement.sharding())

    def busy_since(self, started: float) -> float:
        """When the device began a step dispatched at `started`: not before it finished the previous one."""
        return max(started, self._last_ready)

    def note_ready(self, now: float) -> None:
        """Records when the device finished the latest step."""
        self._last_ready = now


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A dispatched step (the engine's `PendingStep`)."""

    runner: ModelRunner
    plan: StepPlan
    arrays: StepArrays
    started: float

    def is_ready(self) -> bool:
        """The step has ended."""
        return bool(self.arrays.packed.is_ready())  # type: ignore[attr-defined]

    def result(self) -> StepResult:
        """Waits for the step and makes its one device-to-host copy."""
        began = self.runner.busy_since(self.started)
        values = np.asarray(self.arrays.packed)
        now = time.perf_counter()
        self.runner.note_ready(now)
        return StepResult(read_rows(self.plan.rows, values, self.arrays), now - began)
