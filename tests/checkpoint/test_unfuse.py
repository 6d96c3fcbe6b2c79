"""Fused parameters, quantised and cut into linear layers: the same values as floats that are cut and not fused."""

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.checkpoint.leaf_shapes import leaf_shapes
from jaxinfer.checkpoint.save import plan_tensors
from jaxinfer.checkpoint.unfuse import module_array
from jaxinfer.models.registry import family_of_hf_config
from jaxinfer.quant.plan import QuantPlan, input_axis
from jaxinfer.quant.quantize import dequantized, quantize
from jaxinfer.quant.storage import Storage

FAMILIES = ("qwen2", "phi3", "cohere", "gpt_neox", "mixtral", "qwen2_moe")


def matrices(case):
    """Path, float values and tensors of each matrix of a family's tiny model."""
    family = family_of_hf_config(case.config)
    model = family.model_config(case.config)
    tensors = plan_tensors(family, model, "float32")
    rng = np.random.default_rng(0)
    for leaf, spec in leaf_shapes(model, "float32").items():
        if QuantPlan("int8").source(leaf, spec.shape):
            yield leaf, rng.standard_normal(spec.shape).astype(np.float32), tensors[leaf]


@pytest.mark.parametrize("storage", [Storage("int8"), Storage("int4", 8, symmetric=False)], ids=["channel", "groups"])
@pytest.mark.parametrize("name", FAMILIES)
def test_values_are_those_of_the_layers(name, storage, make_case):
    seen = 0
    for leaf, values, tensors in matrices(make_case(name)):
        array = quantize(values, input_axis(leaf, values.shape), storage)
        fused = dequantized(array)
        for tensor in tensors:
            expected = np.concatenate([slot.tensor_rows(fused) for slot in tensor.slots])
            cut = module_array(array, tensor.slots)
            assert cut.shape == expected.shape == tensor.file.shape and cut.axis == 1
            assert cut.group == (expected.shape[1] if storage.group == 0 else 8)
            np.testing.assert_array_equal(dequantized(cut), expected)
            seen += 1
    assert seen >= 4


def test_scales_that_are_codes_are_decoded(make_case):
    leaf, values, tensors = next(matrices(make_case("qwen2")))
    array = quantize(values, input_axis(leaf, values.shape), Storage("nf4", 16, double=True))
    cut = module_array(array, tensors[0].slots)
    np.testing.assert_array_equal(dequantized(cut), tensors[0].slots[0].tensor_rows(dequantized(array)))


def test_groups_and_orders_that_reach_over_experts_are_refused(make_case):
    found = {leaf.split("/", 1)[1]: rest for leaf, *rest in matrices(make_case("mixtral"))}
    values, tensors = found["mlp/down/kernel"]
    row = values.shape[-1]
    with pytest.raises(ValueError, match="groups of 160 inputs, which reach over the 96 inputs"):
        module_array(quantize(values, 1, Storage("int4", 160)), tensors[0].slots)
    array = quantize(values, 1, Storage("int4", 8))
    order = np.arange(array.row, dtype=np.int32)
    second = module_array(replace(array, order=order), tensors[1].slots)
    np.testing.assert_array_equal(second.order, np.arange(row))
    with pytest.raises(ValueError, match=f"mixes those of several layers of {row} inputs"):
        module_array(replace(array, order=order[::-1].copy()), tensors[0].slots)
