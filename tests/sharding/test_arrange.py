"""Parameters cut into parts: what each device gets, told from the whole by plain slicing."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.quant.array import QuantArray, dequantize
from jaxinfer.quant.plan import path_name
from jaxinfer.quant.quantize import quantize
from jaxinfer.quant.storage import Storage
from jaxinfer.sharding.arrange import arrange
from jaxinfer.sharding.placement import Placement
from jaxinfer.sharding.rules import SPLIT, axes_of
from jaxinfer.sharding.shards import Shards, split_of

MODEL = ModelConfig(
    vocab_size=131,
    hidden_size=64,
    intermediate_size=100,
    num_hidden_layers=1,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=16,
)
DOWN, OUT = "layers_0/mlp/down/kernel", "layers_0/attn/out/kernel"


def parts(path: str, leaf: Any, count: int, model: ModelConfig = MODEL, **options: Any) -> list[Any]:
    """What each device gets of a parameter."""
    *parents, name = path.split("/")
    tree: Any = {name: leaf}
    for parent in reversed(parents):
        tree = {parent: tree}
    shards = Shards(split_of(model, count, tree, **options), Placement(axis="model"))
    whole = arrange(path, leaf, shards.split)
    specs = jax.tree.leaves(shards.specs(path, whole))
    wanted, structure = jax.tree.flatten(shards.part(path, whole))

    def slices(device: int) -> Any:
        cut = []
        for array, spec, shape in zip(jax.tree.leaves(whole), specs, wanted, strict=True):
            axis = next((index for index, name in enumerate(spec) if name is not None), None)
            cut.append(array if axis is None else np.split(np.asarray(array), count, axis)[device])
            assert cut[-1].shape == shape.shape and cut[-1].dtype == shape.dtype
        return jax.tree.unflatten(structure, cut)

    return [slices(device) for device in range(count)]


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_a_kv_head_goes_with_its_queries_to_several_devices() -> None:
    qkv = random(2, 6, 16, 64)
    for device, part in enumerate(parts("layers_0/attn/qkv/kernel", qkv, 4)):
        head, half = divmod(device, 2)
        np.testing.assert_array_equal(part[0, :2], qkv[head, 2 * half : 2 * half + 2])
        np.testing.assert_array_equal(part[0, 2:], qkv[head, 4:])
        assert part.shape == (1, 4, 16, 64)


def test_queries_of_two_kv_heads_on_one_device() -> None:
    """6 heads on 2 KV heads over 3 devices: the second has the last query of one and the first of the other."""
    model = replace(MODEL, num_attention_heads=6)
    qkv, out = random(2, 5, 16, 64), random(64, 2, 3, 16)
    middle = parts("layers_0/attn/qkv/kernel", qkv, 3, model)[1]
    np.testing.assert_array_equal(middle[:, 0], np.stack([qkv[0, 2], qkv[1, 0]]))
    np.testing.assert_array_equal(middle[:, 1:], np.stack([qkv[0, 3:], qkv[1, 3:]]))
    np.testing.assert_array_equal(parts(OUT, out, 3, model)[1].reshape(64, 2, 16), out.reshape(64, 6, 16)[:, 2:4])
    keys = random(2, 16)
    np.testing.assert_array_equal(parts("layers_0/attn/k_norm/scale", keys, 3, model)[1], keys)


@pytest.mark.parametrize(
    ("path", "shape", "axis"),
    [
        ("layers_0/mlp/gate_up/kernel", (2, 100, 64), 1),
        ("layers_0/mlp/gate_up/bias", (2, 100), 1),
        (DOWN, (64, 100), 1),
        ("embed/embedding", (131, 64), 0),
        ("lm_head/kernel", (131, 64), 0),
    ],
)
def test_what_does_not_divide_is_filled_up_with_zeros(path: str, shape: tuple[int, ...], axis: int) -> None:
    whole = random(*shape)
    joined = np.concatenate(parts(path, whole, 8), axis)
    size = shape[axis]
    assert joined.shape[axis] == -(-size // 8) * 8
    kept, rest = np.split(joined, [size], axis)
    np.testing.assert_array_equal(kept, whole)
    assert not rest.any()


def test_norms_routers_and_biases_behind_a_sum_are_whole_everywhere() -> None:
    for path, shape in (("layers_0/attn_norm/scale", (64,)), ("layers_0/attn/out/bias", (64,))):
        whole = random(*shape)
        assert all(part is whole for part in parts(path, whole, 4))


def test_every_parameter_of_a_model_is_in_the_table_or_whole() -> None:
    model = replace(MODEL, qk_norm="full", qkv_bias=True, mlp_bias=True, o_bias=True)
    names = {path_name(path): axes_of(path_name(path), leaf.ndim) for path, leaf in _leaves(model)}
    assert {name for axes in names.values() for name in axes} - {""} <= set(SPLIT)
    whole = {path.split("/", 1)[-1] for path, axes in names.items() if not any(SPLIT.get(name) for name in axes)}
    assert whole == {"attn_norm/scale", "mlp_norm/scale", "scale", "attn/out/bias", "mlp/down/bias"}


def _leaves(model: ModelConfig) -> Any:
    return jax.tree_util.tree_leaves_with_path(param_shapes(model))


FORMATS = [
    Storage("int8"),
    Storage("int4", 32),
    Storage("int4", 32, symmetric=False),
    Storage("nf4", 32, double=True),
    Storage("int8", 32),
]


@pytest.mark.parametrize("storage", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("path", "shape", "count"),
    [(DOWN, (64, 96), 2), (OUT, (64, 2, 4, 16), 8), ("layers_0/mlp/gate_up/kernel", (2, 100, 64), 8)],
)
def test_codes_are_cut_with_their_scales(storage: Storage, path: str, shape: tuple[int, ...], count: int) -> None:
    """96 channels in groups of 32 are no two equal parts of whole groups, and 16 channels of a head no whole group."""
    axis = 2 if path.endswith("gate_up/kernel") else 1
    array = quantize(random(*shape), axis, storage, "float32")
    found = [np.asarray(dequantize(part)) for part in parts(path, array, count)]
    joined = np.concatenate([part.reshape(64, -1) for part in found], 1) if axis == 1 else np.concatenate(found, 1)
    expected = np.asarray(dequantize(array)).reshape(joined.shape[0], -1, *joined.shape[2:])
    np.testing.assert_array_equal(joined[:, : expected.shape[1]], expected)
    assert not joined[:, expected.shape[1] :].any()


def test_awq_groups_of_128_on_two_devices_that_each_have_192_inputs() -> None:
    """Field case 7: no group is cut; the first device has two groups and the second one."""
    array = quantize(random(8, 384), 1, Storage("int4", 128, symmetric=False), "float32")
    first, second = parts(DOWN, array, 2, replace(MODEL, intermediate_size=384))
    assert first.group == second.group == 128 and first.shape == second.shape == (8, 256)
    whole = np.asarray(dequantize(array))
    np.testing.assert_array_equal(np.asarray(dequantize(first)), whole[:, :256])
    np.testing.assert_array_equal(np.asarray(dequantize(second))[:, :128], whole[:, 256:])


@pytest.mark.parametrize("splits_experts", [False, True])
def test_experts_are_cut_or_dealt_out(splits_experts: bool) -> None:
    model = replace(MODEL, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=48)
    array = quantize(random(64, 3, 48), 1, Storage("int4", 16), "float32")
    found = [np.asarray(dequantize(part)) for part in parts(DOWN, array, 2, model, splits_experts=splits_experts)]
    joined = np.concatenate(found, axis=1 if splits_experts else 2)
    expected = np.asarray(dequantize(array))
    np.testing.assert_array_equal(joined[:, :3, :48], expected)
    assert np.count_nonzero(joined) == np.count_nonzero(expected)


def test_inputs_in_an_order_of_their_own_are_refused() -> None:
    array = quantize(random(64, 96), 1, Storage("int4", 32), "float32")
    ordered: QuantArray = replace(array, order=np.arange(96, dtype=np.int32))
    with pytest.raises(ValueError, match="tensor_parallel_size=2: the inputs of 'layers_0/mlp/down/kernel' .*desc_act"):
        parts(DOWN, ordered, 2)
