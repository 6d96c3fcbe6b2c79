"""The decoder module: its tree, and how head layouts and dtypes carry through."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.attention import split_rotated
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder, init_params, param_shapes
from jaxinfer.models.rope import inverse_frequencies, rotate, rotation
from jaxinfer.models.sequence import SequenceAttention, SequenceDecoder

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=8,
)


def paths(tree: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in leaves}


def test_the_tree_has_every_weight_as_out_in() -> None:
    shapes = paths(param_shapes(replace(CONFIG, qkv_bias=True, o_bias=True, mlp_bias=True)))
    assert shapes["embed/embedding"] == (40, 24)
    assert shapes["layers_1/attn/qkv/kernel"] == (2, 5, 8, 24)
    assert shapes["layers_1/attn/qkv/bias"] == (2, 5, 8)
    assert shapes["layers_1/attn/out/kernel"] == (24, 2, 3, 8)
    assert shapes["layers_1/attn/out/bias"] == (24,)
    assert shapes["layers_1/mlp/gate_up/kernel"] == (2, 20, 24)
    assert shapes["layers_1/mlp/gate_up/bias"] == (2, 20)
    assert shapes["layers_1/mlp/down/kernel"] == (24, 20)
    assert shapes["layers_1/attn_norm/scale"] == shapes["final_norm/scale"] == (24,)
    assert shapes["lm_head/kernel"] == (40, 24)


def test_tied_heads_have_no_head_of_their_own() -> None:
    assert not any("lm_head" in path for path in paths(param_shapes(replace(CONFIG, tie_word_embeddings=True))))


def test_shapes_of_a_large_model_cost_nothing() -> None:
    config = ModelConfig(128256, 8192, 28672, 80, 64, 8)
    total = sum(int(np.prod(shape)) for shape in paths(param_shapes(config, jnp.bfloat16)).values())
    assert total == 70_553_706_496  # Llama-3-70B


def test_init_makes_the_shapes_it_promises() -> None:
    params = init_params(CONFIG, jax.random.key(0), jnp.bfloat16)
    assert paths(params) == paths(param_shapes(CONFIG))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}


def test_gradients_reach_every_parameter() -> None:
    def attend(qkv: Any, angles: Any, cache: None, sight: Any) -> Any:
        q, k, v = split_rotated(qkv, angles)
        group = q.shape[1] // k.shape[1]
        k, v = jnp.repeat(k, group, 1), jnp.repeat(v, group, 1)
        weights = jax.nn.softmax(jnp.einsum("tnh,snh->nts", q, k))
        return jnp.einsum("nts,snh->tnh", weights, v), cache

    def loss(params: Any) -> jax.Array:
        tokens = jnp.arange(5)
        attention = jax.tree_util.Partial(attend)
        hidden, _ = Decoder(CONFIG).apply({"params": params}, tokens, tokens, attention, [None, None])
        return jnp.sum(Decoder(CONFIG).apply({"params": params}, hidden, method=Decoder.logits) ** 2)

    grads = jax.grad(loss)(init_params(CONFIG, jax.random.key(1)))
    assert all(jnp.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def test_rope_rotates_pairs_half_a_head_apart() -> None:
    config = replace(CONFIG, head_dim=4, rope_theta=100.0)
    assert inverse_frequencies(config).tolist() == pytest.approx([1.0, 0.1])
    x = jnp.array([[[1.0, 2.0, 3.0, 4.0]]])
    angle = np.array([7.0, 0.7])
    first, second = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    expected = [*(first * np.cos(angle) - second * np.sin(angle)), *(second * np.cos(angle) + first * np.sin(angle))]
    np.testing.assert_allclose(rotate(x, rotation(config, jnp.array([7])))[0, 0], expected, rtol=1e-6)


def test_rope_factors_divide_the_frequencies() -> None:
    config = replace(CONFIG, head_dim=4, rope_theta=100.0, rope_freq_factors=(1.0, 8.0))
    assert inverse_frequencies(config).tolist() == pytest.approx([1.0, 0.0125])


def test_rope_angles_stay_exact_in_bfloat16() -> None:
    config = replace(CONFIG, head_dim=4)
    position = 8191  # not representable in bfloat16
    x = jnp.ones((1, 1, 4), jnp.bfloat16)
    rotated = rotate(x, rotation(config, jnp.array([position])))
    assert float(rotated[0, 0, 0]) == pytest.approx(np.cos(position) - np.sin(position), abs=0.01)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_attention_heads": 5}, "must divide num_attention_heads=5"),
        ({"head_dim": 7}, "head_dim=7 must be even"),
        ({"hidden_act": "swish"}, "hidden_act='swish' is not supported"),
        ({"vocab_size": 0}, "vocab_size=0 must be at least 1"),
        ({"rope_freq_factors": (1.0,)}, "rope_freq_factors has 1 values"),
        ({"hidden_size": 64.0}, "hidden_size=64.0 must be an int"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads='2' must be an int"),
        ({"rope_theta": 0}, "rope_theta=0 must be a number above 0"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps='1e-5' must be a number above 0"),
    ],
)
def test_impossible_configs_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        replace(CONFIG, **fields)


def test_numpy_sizes_become_ints() -> None:
    assert type(replace(CONFIG, hidden_size=np.int64(CONFIG.hidden_size)).hidden_size) is int


def test_head_dim_must_be_given_when_it_does_not_follow() -> None:
    with pytest.raises(ValueError, match="give head_dim explicitly"):
        ModelConfig(10, 25, 8, 1, 2)


def test_taps_are_what_goes_into_layers_and_what_comes_out_of_the_last() -> None:
    config = ModelConfig(vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=3, num_attention_heads=2)
    params = init_params(config, jax.random.key(1))
    ids = jnp.array([3, 1, 4, 1, 5], jnp.int32)
    whole = SequenceDecoder(config)
    states = [whole.embed(params, ids[None])]
    for index in range(3):
        states.append(whole.layer(index, params[f"layers_{index}"], states[-1]))
    arguments = ids, jnp.arange(5), SequenceAttention(None, 1), [None] * 3
    hidden, _, seen = Decoder(config).apply({"params": params}, *arguments, (3, 0, 2), method=Decoder.tapped)
    for found, tap in zip(seen, (3, 0, 2), strict=True):
        np.testing.assert_allclose(found, states[tap][0], atol=1e-5)
    plain, _ = Decoder(config).apply({"params": params}, *arguments)
    np.testing.assert_array_equal(hidden, plain)
