"""A real model: both methods lose less than rounding to nearest in the same format."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.calibration.layer_result import CalibratedMethod
from jaxinfer.calibration.layerwise import quantise_layers
from jaxinfer.calibration.text import calibration_samples, calibration_text
from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.checkpoint.leaf_shapes import flat, nested
from jaxinfer.models.sequence import SequenceDecoder
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.quantize import dequantized, quantize
from jaxinfer.quant.storage import Storage
from jaxinfer.tokenizers.load import load_tokenizer

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

LAYERS = 3
"""The first ones are quantised; all of them take minutes (scripts/results/2026-11-30_calibration.md)."""


@pytest.mark.parametrize(
    "method",
    [
        CalibratedMethod("awq", group=64),
        CalibratedMethod("gptq", group=64, act_order=True, static_groups=True),  # as `quantize` has it
    ],
    ids=["awq", "gptq"],
)
def test_perplexity_of_hamlet(method: CalibratedMethod, smollm2_path: Path) -> None:
    checkpoint, tokenizer = open_checkpoint(smollm2_path), load_tokenizer(smollm2_path)
    original = {path: np.asarray(value) for path, value in flat(load_params(checkpoint, "float32")).items()}
    text = (Path(__file__).parents[1] / "data" / "hamlet.txt").read_text(encoding="utf-8")
    ids = jnp.array([tokenizer.encode(text)[:1024]], jnp.int32).reshape(2, 512)
    run = jax.jit(SequenceDecoder(checkpoint.model_config).__call__)

    def perplexity(params: dict[str, Any]) -> float:
        floats = {path: dequantized(v) if isinstance(v, QuantArray) else v for path, v in params.items()}
        scores = jax.nn.log_softmax(run(jax.tree.map(jnp.asarray, nested(floats)), ids))
        found = jnp.take_along_axis(scores[:, :-1], ids[:, 1:, None], axis=2)
        return float(jnp.exp(-found.mean()))

    results = quantise_layers(
        replace(checkpoint.model_config, num_hidden_layers=LAYERS),
        nested(original),
        lambda index: {path: value for path, value in original.items() if path.startswith(f"layers_{index}/")},
        method,
        calibration_samples(tokenizer, calibration_text(), 16, 256),
    )
    quantised, nearest = dict(original), dict(original)
    for result in results:
        quantised |= result.params
        for path, stored in result.params.items():
            if isinstance(stored, QuantArray):
                nearest[path] = quantize(original[path], stored.axis, Storage("int4", 64, symmetric=False))
    loss, loss_of_rounding = (perplexity(params) - perplexity(original) for params in (quantised, nearest))
    assert 0 < loss < loss_of_rounding
