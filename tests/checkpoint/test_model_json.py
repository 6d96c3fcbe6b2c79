"""A ModelConfig through JSON."""

import json

import pytest

from jaxinfer.checkpoint.model_json import config_from_json, config_to_json
from jaxinfer.models.config import ModelConfig

CONFIG = ModelConfig(300, 64, 128, 2, 8, 2, 16, rope_theta=5e5, rope_freq_factors=(1.0,) * 7 + (32.5,), qkv_bias=True)


def test_there_and_back():
    assert config_from_json(json.loads(json.dumps(config_to_json(CONFIG)))) == CONFIG


def test_every_field_is_written():
    assert set(config_to_json(CONFIG)) == set(ModelConfig.__dataclass_fields__)


def test_a_field_that_is_missing_takes_its_default():
    fields = config_to_json(CONFIG)
    del fields["qkv_bias"]
    assert config_from_json(fields).qkv_bias is False


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wings": 2}, "has no field 'wings'; it was written by a newer jaxinfer"),
        ({"hidden_size": "64"}, "hidden_size='64' must be an int"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide"),
    ],
)
def test_what_does_not_fit_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        config_from_json(config_to_json(CONFIG) | change)


def test_a_missing_size_is_named():
    with pytest.raises(ValueError, match="vocab_size"):
        config_from_json({"hidden_size": 64})
    with pytest.raises(ValueError, match="must be a JSON object"):
        config_from_json([1])
