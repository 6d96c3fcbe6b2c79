"""Which parameters are quantised, and what the tree then looks like."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder, init_params, param_shapes
from jaxinfer.quant.array import QuantArray, dequantize
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.quant.storage import Method, Storage

CONFIG = ModelConfig(
    vocab_size=48,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)
MOE = replace(
    CONFIG, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32
)


def quantised_paths(plan: QuantPlan, config: ModelConfig = CONFIG) -> dict[str, QuantArray]:
    leaves = jax.tree_util.tree_leaves_with_path(
        param_shapes(config, jnp.float32, plan), is_leaf=lambda leaf: isinstance(leaf, QuantArray)
    )
    names = ((jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in leaves)
    return {name: leaf for name, leaf in names if isinstance(leaf, QuantArray)}


def test_matrices_of_layers_are_quantised_and_nothing_else_unless_asked() -> None:
    layer = ["attn/out", "attn/qkv", "mlp/down", "mlp/gate_up"]
    expected = {f"layers_0/{name}/kernel" for name in layer}
    assert set(quantised_paths(QuantPlan("int8"))) == expected
    assert set(quantised_paths(QuantPlan("int8", head=True))) == expected | {"lm_head/kernel"}
    assert set(quantised_paths(QuantPlan("int8", embedding=True))) == expected | {"embed/embedding"}
    biased = replace(CONFIG, qkv_bias=True, mlp_bias=True)
    assert set(quantised_paths(QuantPlan("nf4"), biased)) == expected


def test_experts_are_quantised_and_routers_are_not() -> None:
    names = ["attn/out", "attn/qkv", "mlp/down", "mlp/gate_up", "mlp/shared/down", "mlp/shared/gate_up"]
    found = quantised_paths(QuantPlan("int4"), MOE)
    assert set(found) == {f"layers_0/{name}/kernel" for name in names}
    assert found["layers_0/mlp/gate_up/kernel"].codes.shape == (2, 4, 32, 32)
    down = found["layers_0/mlp/down/kernel"]
    assert (down.channels, down.row, down.group, down.codes.shape) == (64, 128, 128, (64, 4, 16))


def test_fused_parameters_keep_their_axes() -> None:
    found = quantised_paths(QuantPlan("int4", group=32))
    qkv, out = found["layers_0/attn/qkv/kernel"], found["layers_0/attn/out/kernel"]
    assert (qkv.shape, qkv.codes.shape, qkv.scale.shape) == ((2, 4, 16, 64), (2, 4, 16, 32), (2, 4, 16, 2))
    assert (out.shape, out.codes.shape, out.scale.shape) == ((64, 2, 2, 16), (64, 2, 2, 8), (64, 2))


def test_the_head_and_the_embedding_take_8_bits() -> None:
    for method, kind in (("int4", np.int8), ("nf4", np.int8), ("fp8", jnp.float8_e4m3fn)):
        found = quantised_paths(QuantPlan(method, head=True, embedding=True))  # type: ignore[arg-type]
        assert {found[name].codes.dtype for name in ("lm_head/kernel", "embed/embedding")} == {np.dtype(kind)}


def test_the_fast_form_is_int8_per_channel_of_the_methods_values() -> None:
    values = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    path = "layers_0/mlp/down/kernel"
    plan = QuantPlan("nf4", fast_form=True)
    assert plan.stored(path, values.shape) == Storage("int8")
    exact = QuantPlan("nf4").apply(path, values, "float32")
    fast = plan.apply(path, values, "float32")
    assert isinstance(exact, QuantArray) and isinstance(fast, QuantArray)
    steps = np.abs(np.asarray(dequantize(exact)) - np.asarray(dequantize(fast))) / fast.scale
    assert steps.max() <= 0.5 + 1e-3


@pytest.mark.parametrize(
    ("method", "config"),
    [("int8", CONFIG), ("int8_w8a8", CONFIG), ("int4", CONFIG), ("nf4", MOE), ("int8_w8a8", MOE)],
    ids=["int8", "int8_w8a8", "int4", "nf4-experts", "int8_w8a8-experts"],
)
def test_the_module_runs_on_what_the_plan_makes(method: Method, config: ModelConfig) -> None:
    """And gives nearly what it gives on the values that the parameters stand for."""
    params = init_params(config, jax.random.key(0))
    plan = QuantPlan(method, head=True, embedding=True)
    shapes = param_shapes(config, jnp.float32, plan)

    def store(path: tuple, leaf: jax.Array) -> object:  # type: ignore[type-arg]
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return jax.device_put(plan.apply(name, np.asarray(leaf), "float32"))

    stored = jax.tree_util.tree_map_with_path(store, params)
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), stored)
    assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes)
    is_quantised = lambda leaf: isinstance(leaf, QuantArray)  # noqa: E731
    floats = jax.tree.map(lambda leaf: dequantize(leaf) if is_quantised(leaf) else leaf, stored, is_leaf=is_quantised)
    tokens = jnp.arange(5)
    run = jax.jit(lambda tree: Decoder(config).apply({"params": tree}, tokens, tokens, method=Decoder._forward))
    expected, found = np.asarray(run(floats)).ravel(), np.asarray(run(stored)).ravel()
    cosine = expected @ found / np.linalg.norm(expected) / np.linalg.norm(found)
    assert cosine > (0.995 if method == "int8_w8a8" else 0.99999)


def test_a_quantised_parameter_of_another_shape_is_refused() -> None:
    params = dict(init_params(CONFIG, jax.random.key(0)))
    kernel = np.zeros((50, 64), np.float32)
    params["lm_head"] = {"kernel": QuantPlan("int8", head=True).apply("lm_head/kernel", kernel, "float32")}
    tokens = jnp.arange(2)
    with pytest.raises(ValueError, match=r"stands for shape \(50, 64\); this layer needs \(48, 64\)"):
        Decoder(CONFIG).apply({"params": params}, tokens, tokens, method=Decoder._forward)


def test_what_is_not_finite_is_named() -> None:
    with pytest.raises(ValueError, match="parameter 'layers_0/mlp/down/kernel' holds NaN or"):
        QuantPlan("int8").apply("layers_0/mlp/down/kernel", np.full((4, 8), np.nan, np.float32), "float32")
