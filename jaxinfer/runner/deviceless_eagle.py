"""The EAGLE draft loop of a model that need not exist, compiled for a GPU that is not here."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.cache.paged import KVCache, kv_cache_shapes
from jaxinfer.config import EagleTree, FeatureSpec
from jaxinfer.models.decoder import param_shapes
from jaxinfer.models.eagle import init_eagle
from jaxinfer.models.eagle3 import Eagle3Config, init_eagle3
from jaxinfer.models.eagle_model import CUT_HEAD, TOKEN_IDS, EagleModel
from jaxinfer.planning.deviceless import DevicelessReport, GPUTarget, compile_for, compiling_for
from jaxinfer.runner.eagle_loop import make_eagle_loop
from jaxinfer.runner.programs import gpu_options
from jaxinfer.runner.runner import TOKEN_PARAMS
from jaxinfer.typing import Params


@dataclass(frozen=True)
class DevicelessLoop:
    """A compiled loop and what it was compiled from.

    Attributes:
        report: what the compiler decided.
        params, kv: shapes of the arguments.
    """

    report: DevicelessReport
    params: Any
    kv: KVCache

    @property
    def donated_bytes(self) -> int:
        """What it must update in place: the pool."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.kv))


def eagle_shapes(model: EagleModel, dtype: Any = jnp.bfloat16, num_guessed: int = 0) -> Params:
    """A head's parameters as `EagleModel` takes them, as `jax.ShapeDtypeStruct` leaves.

    Args:
        model: the head and what it guesses for.
        dtype: of the parameters.
        num_guessed: tokens that a head of version 1 or 2 guesses among; 0 for all.
    """
    head = model.head
    if isinstance(head, Eagle3Config):
        tree, num_guessed = jax.eval_shape(lambda: init_eagle3(head, jax.random.key(0))), head.draft_vocab_size
    else:
        tree = jax.eval_shape(lambda: init_eagle(head, jax.random.key(0), use_bias=model.use_bias))
    params: dict[str, Any] = {"head": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), tree)}
    if num_guessed:
        params[TOKEN_IDS] = jax.ShapeDtypeStruct((num_guessed,), jnp.int32)
        if not isinstance(head, Eagle3Config):
            params[CUT_HEAD] = jax.ShapeDtypeStruct((num_guessed, model.target.hidden_size), dtype)
    return params


def eagle_features(model: EagleModel, tree: EagleTree, num_rows: int, block_size: int, dtype: Any) -> FeatureSpec:
    """What the pool keeps for a head that guesses for so many requests."""
    spare = num_rows * tree.spare_blocks(block_size)
    return FeatureSpec("eagle", model.layer.hidden_size, jnp.dtype(dtype).name, model.layer, spare)


def compile_eagle_loop(
    target: GPUTarget,
    model: EagleModel,
    tree: EagleTree,
    *,
    num_rows: int,
    table_width: int,
    num_guessed: int = 0,
    num_pages: int = 4096,
    block_size: int = 16,
    dtype: Any = jnp.bfloat16,
    kv_dtype: str = "auto",
) -> DevicelessLoop:
    """Compiles the draft loop that the engine would run; nothing is allocated.

    Args:
        target: from `gpu_target`; one device.
        model: the head and what it guesses for.
        tree: what is guessed.
        num_rows: B, requests.
        table_width: M, of the target's block tables.
        num_guessed: as for `eagle_shapes`.
        num_pages: P, of each layer's pool.
        block_size: S.
        dtype: of parameters and activations.
        kv_dtype: of the pool, one of `jaxinfer.config.KV_CACHE_DTYPES`; "auto" is `dtype`.
    """
    token_params = {name: leaf for name, leaf in param_shapes(model.target, dtype).items() if name in TOKEN_PARAMS}
    params = eagle_shapes(model, dtype, num_guessed)
    kv_dtype = jnp.dtype(dtype).name if kv_dtype == "auto" else kv_dtype
    features = eagle_features(model, tree, num_rows, block_size, dtype)
    kv = kv_cache_shapes(model.target, num_pages, block_size, kv_dtype, features)
    width = table_width + tree.spare_blocks(block_size)
    trees = jax.tree.structure(params), jax.tree.structure(token_params)
    sizes = {"num_rows": num_rows, "table_width": width, "block_size": block_size}
    loop = make_eagle_loop(model, trees, tree, **sizes)
    leaves = (*jax.tree.leaves(params), *jax.tree.leaves(token_params))
    packed = jax.ShapeDtypeStruct((num_rows * (2 + width),), jnp.int32)
    with compiling_for(target):
        options = gpu_options(token_params)
    report = compile_for(target, jax.jit(loop, donate_argnums=1), leaves, kv, packed, compiler_options=options)
    return DevicelessLoop(report, leaves, kv)
