"""What a config says of each layer, and the factors and caps around the decoder (field case 23)."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.attention import split_rotated
from jaxinfer.models.config import LayerKind, ModelConfig
from jaxinfer.models.decoder import Decoder, param_shapes
from jaxinfer.models.registry import family_of_hf_config

SIZES = {
    "vocab_size": 40,
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
FULL = LayerKind(None, "global", False)


def read(architecture: str, **config: Any) -> ModelConfig:
    merged = {"architectures": [architecture], **SIZES, **config}
    return family_of_hf_config(merged).model_config(merged)


def windows(architecture: str, **config: Any) -> list[int | None]:
    return [kind.window for kind in read(architecture, **config).layer_kinds]


def test_plain_layers_are_all_alike() -> None:
    assert read("LlamaForCausalLM").layer_kinds == (FULL,) * 6
    assert read("LlamaForCausalLM").windows == (None,)


def test_which_layers_have_a_window() -> None:
    assert windows("MistralForCausalLM") == [4096] * 6
    assert windows("MistralForCausalLM", sliding_window=None) == [None] * 6
    assert windows("Qwen2ForCausalLM", sliding_window=8, max_window_layers=4) == [None] * 6
    qwen = {"use_sliding_window": True, "sliding_window": 8}
    assert windows("Qwen2ForCausalLM", **qwen, max_window_layers=4) == [None] * 4 + [8] * 2
    assert windows("Qwen3ForCausalLM", **qwen) == [None] * 6  # all of the first 28 are full
    types = ["sliding_attention", "full_attention"] * 3
    assert windows("Qwen2ForCausalLM", **qwen, layer_types=types) == [8, None] * 3
    assert windows("Gemma2ForCausalLM") == [4096, None] * 3
    assert windows("Gemma3ForCausalLM", sliding_window=8) == [8] * 5 + [None]
    assert windows("Gemma3ForCausalLM", sliding_window=8, sliding_window_pattern=2) == [8, None] * 3
    assert windows("Cohere2ForCausalLM") == [4096] * 3 + [None] + [4096] * 2
    assert windows("Phi3ForCausalLM", sliding_window=9) == [9] * 6


def test_which_layers_rotate_and_how() -> None:
    def ropes(architecture: str, **config: Any) -> list[str]:
        return [kind.rope for kind in read(architecture, **config).layer_kinds]

    assert ropes("SmolLM3ForCausalLM") == ["global"] * 3 + ["none"] + ["global"] * 2
    assert ropes("SmolLM3ForCausalLM", no_rope_layers=[0, 1] * 3) == ["none", "global"] * 3
    assert ropes("Cohere2ForCausalLM") == ["global"] * 3 + ["none"] + ["global"] * 2
    assert ropes("Gemma3ForCausalLM") == ["local"] * 5 + ["global"]


def test_which_layers_have_experts() -> None:
    config = read("Qwen3MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[3])
    assert [kind.moe for kind in config.layer_kinds] == [False, True, False, False, False, True]
    assert all(kind.moe for kind in read("MixtralForCausalLM").layer_kinds)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rotary_dim": 20}, "rotary_dim=20 must be even and at most head_dim=18"),
        ({"window_layers": (True,)}, "window_layers has 1 entries for num_hidden_layers=6"),
        ({"num_experts": 4}, "num_experts_per_tok=0 must be 1 to num_experts=4"),
        ({"num_experts": 4, "num_experts_per_tok": 2}, "needs moe_intermediate_size"),
        ({"norm": "batch"}, "norm='batch' is not supported; use one of rms, layer"),
        ({"pre_norms": False}, "pre_norms=False needs post_norms=True"),
        ({"sliding_window": 0}, "sliding_window=0 must be at least 1"),
        ({"attn_softcap": 0.0}, "attn_softcap=0.0 must be a number above 0"),
        ({"sliding_window": 4.5}, "sliding_window=4.5 must be an int"),
    ],
    ids=str,
)
def test_impossible_fields_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        replace(read("LlamaForCausalLM"), **fields)


def forward(config: ModelConfig, params: Any) -> tuple[np.ndarray, np.ndarray]:
    """What the first attention gets, and the logits."""
    seen = []

    def attend(qkv: Any, angles: Any, cache: None, sight: Any) -> Any:
        seen.append(qkv)
        return split_rotated(qkv, angles)[0], cache

    tokens = jnp.arange(3)
    decoder, attention = Decoder(config), jax.tree_util.Partial(attend)
    with jax.disable_jit():
        caches = [None] * config.num_hidden_layers
        hidden, _ = decoder.apply({"params": params}, tokens, tokens, attention, caches)
    return np.asarray(seen[0]), np.asarray(decoder.apply({"params": params}, hidden, method=Decoder.logits))


def test_gemma_rounds_the_embedding_scale_to_the_type_of_the_model() -> None:
    """sqrt(72) is 8.48528, in bfloat16 8.5: seen through layers that add nothing and a final norm that halves."""
    value = 1.0859375  # times 8.5 it rounds to 9.25, times 8.48528 to 9.1875
    config = read("GemmaForCausalLM", num_hidden_layers=1)
    config = replace(config, rms_norm_eps=4**10 - 9.25**2)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), param_shapes(config, jnp.bfloat16))
    table = jnp.full((40, 72), value, jnp.bfloat16).at[1].set(jnp.eye(72, dtype=jnp.bfloat16)[0])
    _, logits = forward(config, {**params, "embed": {"embedding": table}})
    assert logits[0, 1] * 2**10 == 9.25


def test_the_final_cap_bounds_the_logits_and_scales_come_first() -> None:
    config = read("Gemma2ForCausalLM", num_hidden_layers=1, final_logit_softcapping=3.0)
    random = np.random.default_rng(1)
    params = jax.tree.map(lambda leaf: jnp.float32(random.normal(0, 5, leaf.shape)), param_shapes(config))
    _, capped = forward(config, params)
    _, raw = forward(replace(config, logit_softcap=None), params)
    assert np.abs(raw).max() > 100
    assert np.abs(capped).max() <= 3
    np.testing.assert_allclose(capped, 3 * np.tanh(raw / 3), rtol=1e-5)
    _, scaled = forward(replace(config, logit_multiplier=0.25), params)
    np.testing.assert_allclose(scaled, 3 * np.tanh(raw / 12), rtol=1e-5, atol=1e-6)
