"""MedusaRunner: runs the Medusa heads of an engine's model on the device and owns their weights there."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.medusa import MedusaConfig
from jaxinfer.runner.buckets import bucket_for, token_buckets
from jaxinfer.runner.medusa_step import make_medusa_step
from jaxinfer.runner.programs import gpu_options
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.sharding.placement import WHOLE
from jaxinfer.typing import Params
from pallas_kernels.dispatch import current_device


class MedusaRunner:
    """One program for each size of batch: features of tokens -> the best guesses of every head.

    Args:
        runner: of the model that the heads belong to; its pool keeps the features "hidden".
        heads: of the heads.
        params: of `MedusaHeads`, in the dtype of the activations. They lie where the model does, whole on each device.
        num_candidates: C, guesses of each head.
    """

    def __init__(self, runner: ModelRunner, heads: MedusaConfig, params: Params, num_candidates: int) -> None:
        config = runner.config
        if config.features is None or config.features.kind != "hidden" or config.speculation is None:
            raise ValueError(f"features={config.features}: Medusa heads guess from hidden states that the pool keeps")
        self._runner = runner
        self._heads = heads
        self._num_candidates = num_candidates
        self._params_tree = jax.tree.structure(params)
        self.update_params(params)
        most = min(config.speculation.max_running, config.scheduler.max_num_seqs)
        self._buckets = token_buckets(most, most)
        self._programs: dict[int, jax.stages.Compiled] = {}

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far; does not move after `warm_up`."""
        return len(self._programs)

    def warm_up(self, progress: bool = False) -> None:
        """Compiles every program it will ever run, or loads it from the persistent cache."""
        from jaxinfer.progress_bar import ProgressBar

        for bucket in ProgressBar(self._buckets, desc="Compiling Medusa heads", disable=not progress):
            self._program(bucket)

    def candidates(self, pages: Sequence[int], offsets: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Guesses from the features of some tokens.

        Args:
            pages, offsets: the slot of each token in the pool.

        Returns:
            ids int32[B, K, C] and log-probabilities float32[B, K, C], best first. Head k guesses the token k + 2 places
            after the given one.
        """
        count = len(pages)
        places = np.zeros((2, bucket_for(count, self._buckets)), np.int32)
        places[:, :count] = pages, offsets
        sent = self._runner.placement.put(places)
        tokens = tuple(jax.tree.leaves(self._runner.token_params))
        packed = np.asarray(self._program(places.shape[1])(self._leaves, tokens, self._runner.kv.features, sent))
        return packed[0, :count], packed[1, :count].view(np.float32)

    def update_params(self, params: Params) -> None:
        """Uses other weights of the same shapes from the next call on."""
        self._leaves = tuple(jax.tree.leaves(self._runner.placement.put(params)))

    def take_params(self) -> tuple[jax.Array, ...]:
        """The weights, which it lets go of: nothing is computed before it gets others."""
        leaves, self._leaves = self._leaves, ()
        return leaves

    def _program(self, bucket: int) -> jax.stages.Compiled:
        program = self._programs.get(bucket)
        if program is None:
            program = self._programs[bucket] = self._lower(bucket).compile()
        return program

    def _lower(self, bucket: int) -> jax.stages.Lowered:
        runner, shards, placement = self._runner, self._runner.shards, self._runner.placement
        tokens = runner.token_params
        specs = tuple(jax.tree.leaves(shards.tree_specs(tokens)))
        token_tree = jax.tree.structure(shards.part_shapes(tokens))
        step = make_medusa_step(shards, self._heads, self._params_tree, token_tree, self._num_candidates)
        function = placement.program(step, (WHOLE, specs, WHOLE, WHOLE), WHOLE)
        shapes = (
            jax.tree.map(placement.shape, self._leaves),
            tuple(map(placement.shape, jax.tree.leaves(tokens), specs)),
            placement.shape(runner.kv.features),
        )
        places = placement.shape(jax.ShapeDtypeStruct((2, bucket), jnp.int32))
        options = gpu_options(runner.token_params) if current_device().platform == "gpu" else None
        return jax.jit(function, compiler_options=options).lower(*shapes, places)
