"""DraftPrograms: the compiled steps of a draft model."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp

from jaxinfer.cache.paged import KVCache
from jaxinfer.config import EngineConfig
from jaxinfer.runner.buckets import bucket_for
from jaxinfer.runner.draft_step import DraftState, make_draft_step
from jaxinfer.runner.inputs import StepSpec, packed_size
from jaxinfer.runner.programs import COMPILE_THREADS, compiled_buckets, gpu_options, table_width
from jaxinfer.sharding.placement import WHOLE, Placement
from pallas_kernels.dispatch import current_device


class DraftPrograms:
    """Compiles draft steps ahead of time and hands them out: every bucket of the engine times {greedy, sampler}.

    Args:
        config: of the engine, with the draft's model.
        vocab_size: V of the target.
        params, kv, state: arrays or shapes of the draft's.
        placement: where the programs run; None is JAX's default device.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        params: object,
        kv: KVCache,
        state: DraftState,
        placement: Placement | None = None,
    ) -> None:
        self._placement = placement or Placement()
        self.buckets = compiled_buckets(config)
        self._config = config
        self._vocab_size = vocab_size
        leaves, self._params_tree = jax.tree.flatten(params)
        self._gpu_options = gpu_options(params)
        self._shapes = jax.tree.map(self._placement.shape, (tuple(leaves), kv, state))
        self._steps: dict[StepSpec, jax.stages.Compiled] = {}

    @property
    def num_compiled(self) -> int:
        """Programs compiled (or loaded from the persistent cache) so far."""
        return len(self._steps)

    def spec(self, num_tokens: int, sampler: bool) -> StepSpec:
        """The spec of the smallest bucket that holds `num_tokens`."""
        bucket = bucket_for(num_tokens, self.buckets)
        rows = min(bucket, self._config.scheduler.max_num_seqs)
        return StepSpec(bucket, rows, table_width(self._config), sampler, num_drafts=int(sampler))

    def step(self, spec: StepSpec) -> jax.stages.Compiled:
        """The program of a spec: ``(leaves, kv, state, packed) -> DraftOutput``; kv and state are donated."""
        program = self._steps.get(spec)
        if program is None:
            program = self._steps[spec] = self._lower(spec).compile()
        return program

    def compile_all(self, progress: bool) -> None:
        """Compiles all of them."""
        from jaxinfer.progress_bar import ProgressBar

        specs = [self.spec(bucket, sampler) for bucket in self.buckets for sampler in (False, True)]
        with (
            ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="jaxinfer-compile") as pool,
            ProgressBar(total=len(specs), desc="Compiling draft steps", disable=not progress) as bar,
        ):
            for _ in pool.map(self.step, specs):
                bar.update()

    def _lower(self, spec: StepSpec) -> jax.stages.Lowered:
        function = make_draft_step(
            self._config.model,
            self._params_tree,
            spec,
            block_size=self._config.cache.block_size,
            vocab_size=self._vocab_size,
        )
        packed = jax.ShapeDtypeStruct((packed_size(spec),), jnp.int32)
        options = self._gpu_options if current_device().platform == "gpu" else None
        function = self._placement.program(function, WHOLE, WHOLE)
        return jax.jit(function, donate_argnums=(1, 2), compiler_options=options).lower(*self._shapes, packed)
