"""Programs: the compiled step functions, one a spec, and the count of them."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.paged import KVCache, copy_blocks, move_slots
from jaxinfer.config import EngineConfig
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.gpu_matmul import act_dtype
from jaxinfer.runner.block_copies import COPIES_A_CALL
from jaxinfer.runner.buckets import bucket_for, token_buckets
from jaxinfer.runner.eagle_step import EagleHead, EagleStep
from jaxinfer.runner.inputs import StepSpec, packed_size
from jaxinfer.runner.slot_moves import MOVES_A_CALL
from jaxinfer.runner.step import StepOutput, make_forward_step
from jaxinfer.runner.tiled_step import make_tiled_step
from jaxinfer.sampling.state import COUNTS_A_CALL, SamplingState, count_tokens, upload_bias, upload_counts
from jaxinfer.sharding.placement import WHOLE, Placement
from jaxinfer.sharding.shards import Shards, shards_of
from pallas_kernels.dispatch import current_device

COMPILE_THREADS = 2

PACKED_LOGPROBS = 20
"""Most alternatives a row brings back in the step's one copy; whoever wants more has its logits fetched."""

GPU_OPTIONS: Mapping[str, bool | int | str] = MappingProxyType(
    {
        # Products by cuBLASLt are one launch each and add the residual as they write their result. XLA's own are split
        # along K and added up by a second kernel, which makes three launches a layer more.
        "xla_gpu_enable_triton_gemm": False,
        # Between two collectives there are only four launches of a feed-forward layer; XLA leaves fewer than five out.
        "xla_gpu_graph_min_graph_size": 1,
        # A pool that fills the GPU makes XLA save scratch memory, of which a step needs little, by computing RoPE's
        # angles again in every layer: one launch a layer more.
        # XLA pads what cuBLAS multiplies to multiples of 8, although cuBLASLt needs only rows that begin aligned: seven
        # launches a layer more for 2 to 7 rows, and a copy of a head of odd height (GPT-2, Granite) in every step.
        "xla_disable_hlo_passes": "rematerialization,cublas-pad-for-gemms",
        # XLA computes products with the same left side as one: for a router of 8 rows it would copy the weights of all
        # experts beside it, 1.8 GB a layer of Mixtral-8x7B in every step.
        "xla_gpu_dot_merger_threshold_mb": 0,
    }
)
"""XLA's options for a step on a GPU."""

TILED_GPU_OPTIONS: Mapping[str, bool | int | str] = MappingProxyType({"xla_gpu_autotune_level": 0})
"""What comes to them in the deterministic mode: no product is chosen by how long it takes, which differs from run to
run and decides about roundings."""


def gpu_options(params: object) -> dict[str, bool | int | str]:
    """`GPU_OPTIONS`, or what suits parameters of 8 bits better that meet activations of 16 on the current device: XLA's
    own products, which convert the codes as they read them. cuBLASLt would be given a copy of every matrix in 16 bits.

    Args:
        params: parameters, or their shapes.
    """
    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, QuantArray))
    converts = any(isinstance(leaf, QuantArray) and leaf.bits == 8 and act_dtype(leaf) is None for leaf in leaves)
    return dict(GPU_OPTIONS) | ({"xla_gpu_enable_triton_gemm": True} if converts else {})


def table_width(config: EngineConfig) -> int:
    """M: blocks of the longest sequence a request may have."""
    return -(-config.scheduler.max_model_len // config.cache.block_size)


def compiled_buckets(config: EngineConfig) -> tuple[int, ...]:
    """The step sizes of this engine."""
    scheduler = config.scheduler
    return scheduler.token_buckets or token_buckets(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)


def pool_specs(shards: Shards, kv: KVCache) -> KVCache:
    """How each array of a pool is cut, in the pool's own form: keys and values of the model by KV heads; what is kept
    for guessing lies whole on every device."""
    count = shards.split.model.num_hidden_layers
    layers = (*[shards.pool_spec] * count, *[WHOLE] * (len(kv.layers) - count))
    specs: Any = (jax.tree.map(lambda _, spec=spec: spec, layer) for layer, spec in zip(kv.layers, layers, strict=True))
    return KVCache(tuple(specs), None if kv.features is None else WHOLE)  # type: ignore[arg-type]


class Programs:
    """Compiles step functions ahead of time and hands them out.

    The documented set is every bucket of `compiled_buckets` times {greedy, sampler}, the two uploads of sampling state
    and the copy of blocks. With speculation each bucket above `max_num_seqs` comes with more logits rows as well, and
    there is a program that counts tokens; where drafts may be trees, steps with drafts are programs of their own, and
    one moves slots of the pool. Nothing else is compiled by an engine.

    Args:
        config: the engine's settings.
        params: arranged parameters, or their shapes; the values are not kept.
        kv: the pool, or its shapes.
        state: sampling state, or its shapes.
        shards: how the model lies on which devices; None is whole on JAX's default device.
    """

    def __init__(
        self,
        config: EngineConfig,
        params: object,
        kv: KVCache,
        state: SamplingState,
        shards: Shards | None = None,
    ) -> None:
        self.config = config
        self._shards = shards or shards_of(config.model, Placement())
        self.buckets = compiled_buckets(config)
        wanted = config.runner.max_logprobs
        limit = min(PACKED_LOGPROBS, config.model.vocab_size)
        self.num_logprobs = limit if wanted < 0 else min(wanted, limit)
        placement, pool = self._shards.placement, pool_specs(self._shards, kv)
        specs = tuple(jax.tree.leaves(self._shards.tree_specs(params)))
        self._params_tree = jax.tree.structure(self._shards.part_shapes(params))
        self._gpu_options = gpu_options(params)
        self._shapes = (
            tuple(map(placement.shape, jax.tree.leaves(params), specs)),
            jax.tree.map(placement.shape, kv, pool),
            jax.tree.map(placement.shape, state),
        )
        self._specs = specs, pool
        self.eagle: EagleHead | None = None
        """The head whose layer steps keep up; set before anything is compiled. Its arrays may be shapes."""
        self._steps: dict[StepSpec, jax.stages.Compiled] = {}
        self._uploads: dict[str, jax.stages.Compiled] = {}
        self._copy: jax.stages.Compiled | None = None
        self._count: jax.stages.Compiled | None = None
        self._move: jax.stages.Compiled | None = None

    def spec(self, num_tokens: int, sampler: bool, num_logits: int = 0, has_drafts: bool = False) -> StepSpec:
        """The spec of the smallest bucket that holds `num_tokens`; with more logits rows than `max_num_seqs` where
        these are not enough for `num_logits`; for trees where there are drafts and they may be such."""
        config = self.config
        bucket, seqs = bucket_for(num_tokens, self.buckets), config.scheduler.max_num_seqs
        rows = min(bucket, seqs)
        if tile := config.runner.tile:
            return StepSpec(bucket, rows, table_width(config), sampler, -(-rows // tile) * tile, tile=tile)
        widest = min(bucket, seqs + config.max_draft_rows)
        logits = widest if widest > rows and num_logits > rows else 0
        speculation = config.speculation
        if speculation is None:
            return StepSpec(bucket, rows, table_width(config), sampler, logits)
        tree_width = 1 + speculation.num_tokens if has_drafts and speculation.tree_depth else 0
        if tree_width and widest > rows:
            logits = widest
        drafts, keeps = (speculation.depth, speculation.keeps_probabilities) if sampler else (0, False)
        typical = speculation.typical if sampler else None
        return StepSpec(bucket, rows, table_width(config), sampler, logits, drafts, keeps, tree_width, typical)

    @property
    def num_compiled(self) -> int:
        """Programs compiled (or loaded from the persistent cache) so far."""
        others = (self._copy, self._count, self._move)
        return len(self._steps) + len(self._uploads) + sum(program is not None for program in others)

    def step(self, spec: StepSpec) -> jax.stages.Compiled:
        """The program of a spec: ``(leaves, kv, state, packed) -> StepOutput``; kv and state are donated."""
        program = self._steps.get(spec)
        if program is None:
            program = self._steps[spec] = self.lower(spec).compile()
        return program

    def upload(self, kind: str) -> jax.stages.Compiled:
        """The program that replaces a slot's row of the sampling state: kind "bias" or "counts"."""
        program = self._uploads.get(kind)
        if program is None:
            function, dtype = {"bias": (upload_bias, jnp.float32), "counts": (upload_counts, jnp.int32)}[kind]
            slot = jax.ShapeDtypeStruct((), jnp.int32)
            row = jax.ShapeDtypeStruct((self.config.model.vocab_size,), dtype)
            program = self._uploads[kind] = function.lower(self._shapes[2], slot, row).compile()
        return program

    def copy(self) -> jax.stages.Compiled:
        """The program that copies blocks: ``(kv, source_ids, target_ids) -> kv``, int32[COPIES_A_CALL] each; kv is
        donated. It is not part of the steps, so that those pay nothing for it."""
        if self._copy is None:
            ids = jax.ShapeDtypeStruct((COPIES_A_CALL,), jnp.int32)
            pool = self._specs[1]
            function = self._shards.placement.program(copy_blocks, (pool, WHOLE, WHOLE), pool)
            self._copy = jax.jit(function, donate_argnums=0).lower(self._shapes[1], ids, ids).compile()
        return self._copy

    def move(self) -> jax.stages.Compiled:
        """The program that moves slots: ``(kv, slots) -> kv``, int32[2, MOVES_A_CALL]; kv is donated."""
        if self._move is None:
            slots = jax.ShapeDtypeStruct((2, MOVES_A_CALL), jnp.int32)
            pool = self._specs[1]
            function = self._shards.placement.program(move_slots, (pool, WHOLE), pool)
            self._move = jax.jit(function, donate_argnums=0).lower(self._shapes[1], slots).compile()
        return self._move

    def count(self) -> jax.stages.Compiled:
        """The program `count_tokens`."""
        if self._count is None:
            ids = jax.ShapeDtypeStruct((COUNTS_A_CALL,), jnp.int32)
            self._count = count_tokens.lower(self._shapes[2], ids, ids).compile()
        return self._count

    def lower(self, spec: StepSpec) -> jax.stages.Lowered:
        """A spec's step function, traced and lowered for the default device."""
        static = (self.config.model, self._params_tree, spec)
        options: dict[str, Any] = {
            "block_size": self.config.cache.block_size,
            "num_logprobs": self.num_logprobs,
            "processors": self.config.runner.logits_processors,
        }
        if spec.tile:
            function = make_tiled_step(*static, **options)
        else:
            eagle = None if self.eagle is None else self._eagle_step(self.eagle)
            function = make_forward_step(*static, **options, eagle=eagle, shards=self._shards)
        packed = jax.ShapeDtypeStruct((packed_size(spec),), jnp.int32)
        compiler_options = None
        if current_device().platform == "gpu":
            compiler_options = self._gpu_options | dict(TILED_GPU_OPTIONS if spec.tile else {})
        places = (self.config.max_draft_rows, self.config.model.vocab_size)
        extras: tuple[Any, ...] = (jax.ShapeDtypeStruct(places, jnp.float32),) if spec.keeps_probabilities else ()
        if self.eagle is not None:
            extras = (None, tuple(map(self._shards.placement.shape, jax.tree.leaves(self.eagle.params))))
        leaves, pool = self._specs
        outputs: Any = StepOutput(WHOLE, WHOLE, pool, WHOLE)  # type: ignore[arg-type]
        specs = (leaves, pool, WHOLE, WHOLE, *jax.tree.map(lambda _: WHOLE, extras))
        function = self._shards.placement.program(function, specs, outputs)
        return jax.jit(function, donate_argnums=(1, 2), compiler_options=compiler_options).lower(
            *self._shapes, packed, *extras
        )

    def _eagle_step(self, eagle: EagleHead) -> EagleStep:
        return EagleStep(eagle.model, jax.tree.structure(eagle.params), self.config.cache.block_size)

    def compile_all(self, progress: bool) -> None:
        """Compiles the documented set, two programs at a time: XLA leaves cores idle while LLVM works on one."""
        from jaxinfer.progress_bar import ProgressBar  # scripts/gpu_check.py does without tqdm

        modes = (True,) if self.config.runner.logits_processors else (False, True)
        speculation, kinds = self.config.speculation, [(0, False)]
        if speculation:
            kinds.append((self.config.scheduler.max_num_seqs + 1, True))
        found = [self.spec(bucket, mode, *kind) for bucket in self.buckets for mode in modes for kind in kinds]
        # A tree has two tokens at least.
        specs = [spec for spec in dict.fromkeys(found) if spec.num_tokens > 1 or not spec.tree_width]
        for kind in ("bias", "counts"):
            self.upload(kind)
        self.copy()
        if speculation:
            self.count()
            if speculation.tree_depth:
                self.move()
        with (
            ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="jaxinfer-compile") as pool,
            ProgressBar(total=len(specs), desc="Compiling step programs", disable=not progress) as bar,
        ):
            for _ in pool.map(self.step, specs):
                bar.update()
