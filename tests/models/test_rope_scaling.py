"""Stretched rotary frequencies: their numbers (field case 8), every spelling, and what is refused."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import family_of_hf_config
from jaxinfer.models.rope import inverse_frequencies, rotation
from jaxinfer.models.rope_scaling import RopeScaling

SIZES = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 128,
}
PLAIN = np.array([1, 0.1, 0.01, 0.001])
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}


def read(**config: Any) -> ModelConfig:
    merged = {**SIZES, **config}
    return family_of_hf_config(merged).model_config(merged)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("kind", "numbers", "frequencies", "magnitude"),
    [
        ("llama3", LLAMA3, [1, 0.0427512, 0.00125, 0.000125], 1.0),
        ("yarn", YARN, [1, 0.0625, 0.0025, 0.00025], 1.138629),
        ("yarn", {**YARN, "attention_factor": 1.0}, [1, 0.0625, 0.0025, 0.00025], 1.0),
        ("yarn", {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, [1, 0.0625, 0.0025, 0.00025], 1.0),
        ("linear", {"factor": 4.0}, PLAIN / 4, 1.0),
    ],
)
def test_published_numbers_in_every_spelling(
    kind: str, numbers: dict[str, float], frequencies: Any, magnitude: float, key: str, spelling: str
) -> None:
    config = read(**{key: {spelling: kind, **numbers}})
    np.testing.assert_allclose(inverse_frequencies(config), frequencies, rtol=2e-6)
    angles = rotation(config, jnp.array([0, 3]))
    np.testing.assert_allclose(angles.cos[0], magnitude, rtol=1e-6)
    np.testing.assert_allclose(angles.cos[1], magnitude * np.cos(3 * np.array(frequencies)), rtol=1e-5)


def test_dynamic_is_plain_up_to_the_trained_length_and_has_a_larger_base_beyond() -> None:
    scaling = RopeScaling("dynamic", 64, factor=4.0)
    for length in (1, 64):
        np.testing.assert_allclose(scaling.frequencies(1e4, 8, length), PLAIN, rtol=1e-12)
    base = 1e4 * (4 * 100 / 64 - 3) ** (8 / 6)
    np.testing.assert_allclose(scaling.frequencies(1e4, 8, 100), base ** -(np.arange(4) / 4), rtol=1e-12)


def test_dynamic_is_served_for_the_longest_sequence() -> None:
    config = read(rope_scaling={"type": "dynamic", "factor": 4.0})
    assert config.max_position_embeddings == 512
    expected = config.rope_scaling.frequencies(1e4, 8, 512)  # type: ignore[union-attr]
    np.testing.assert_allclose(inverse_frequencies(config), expected, rtol=1e-6)


def test_longrope_takes_the_list_of_its_length() -> None:
    scaling = RopeScaling("longrope", 16, factor=4.0, short_factor=(1, 1, 1, 2), long_factor=(4, 4, 4, 8))
    np.testing.assert_allclose(scaling.frequencies(1e4, 8, 16), PLAIN / [1, 1, 1, 2])
    np.testing.assert_allclose(scaling.frequencies(1e4, 8, 17), PLAIN / [4, 4, 4, 8])
    assert scaling.magnitude() == pytest.approx(math.sqrt(1.5))


def test_phi3_says_the_trained_length_outside_and_calls_longrope_su_or_yarn() -> None:
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    for kind in ("su", "yarn", "longrope"):
        config = read(
            architectures=["Phi3ForCausalLM"],
            original_max_position_embeddings=32,
            rope_scaling={"type": kind, **lists},
        )
        scaling = config.rope_scaling
        assert scaling is not None
        assert (scaling.kind, scaling.original_max_position_embeddings, scaling.factor) == ("longrope", 32, 4.0)


def test_layer_types_with_settings_of_their_own() -> None:
    gemma = {"architectures": ["Gemma3ForCausalLM"], "head_dim": 8, "sliding_window": 4}
    linear = {"rope_type": "linear", "factor": 8.0}
    new = {
        "full_attention": {**linear, "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    config = read(**gemma, rope_parameters=new)
    assert (config.rope_theta, config.local_rope_theta) == (5e5, 300.0)
    assert config == read(**gemma, rope_theta=5e5, rope_local_base_freq=300.0, rope_scaling=linear)
    assert [kind.rope for kind in config.layer_kinds] == ["local"] * 4  # the sixth would be global
    np.testing.assert_allclose(inverse_frequencies(config, local=True), 300.0 ** -(np.arange(4) / 4), rtol=1e-6)
    new["sliding_attention"] = {**linear, "rope_theta": 300.0}
    with pytest.raises(ValueError, match="'linear' on windowed layers is not supported"):
        read(**gemma, rope_parameters=new)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"type": "linear"}, "'linear' has no 'factor'"),
        ({"type": "linear", "factor": -1.0}, "factor=-1.0"),
        ({"type": "dynamic", "factor": 2.0, "alpha": 1000}, "'dynamic' has 'alpha'"),
        ({"type": "mrope", "mrope_section": [1, 2, 1]}, "type 'mrope' is not supported"),
        ({"type": "longrope", "factor": 2.0}, "needs short_factor and long_factor"),
        ({"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor has 1 values"),
        ({"type": "llama3", **LLAMA3, "low_freq_factor": 4.0}, "low_freq_factor=4.0"),
    ],
    ids=str,
)
def test_what_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(rope_scaling=settings)


def test_a_part_of_the_head_rotates() -> None:
    config = read(partial_rotary_factor=0.5)
    assert config.rotary_dim == 4
    np.testing.assert_allclose(inverse_frequencies(config), [1, 0.01], rtol=1e-6)
    assert rotation(config, jnp.arange(3)).cos.shape == (3, 2)
    assert config == read(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5})
