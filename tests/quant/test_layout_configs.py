"""The `quantization_config` of published checkpoints, as tools have written it over the years, and broken ones."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from jaxinfer.quant.layouts.gptq import GPTQLayout
from jaxinfer.quant.layouts.registry import layout_of

WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
FP8 = {"num_bits": 8, "type": "float"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def compressed(more: Mapping[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights, "input_activations": None}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}
    return said | {"ignore": ["lm_head"]} | dict(more or {})


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (  # Optimum's, which transformers wrote: everything is there, most of it null
            {**GPTQ, "batch_size": 1, "block_name_to_quantize": None, "modules_in_block_to_quantize": None}
            | {"dataset": None, "exllama_config": {"version": 1}, "tokenizer": None, "use_exllama": True},
            "gptq, 4 bits in groups of 128",
        ),
        (  # GPTQModel's
            {**GPTQ, "checkpoint_format": "gptq", "format": "gptq", "method": "gptq", "lm_head": False}
            | {"pack_dtype": "int32", "dynamic": None, "meta": {"quantizer": ["gptqmodel:5.0.0"]}},
            "gptq, 4 bits in groups of 128",
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
            | {"backend": "autoawq", "do_fuse": False, "modules_to_fuse": None, "modules_to_not_convert": None},
            "awq, 4 bits in groups of 128",
        ),
        (
            compressed({"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}, actorder="weight"),
            "compressed-tensors, int4 in groups of 128",
        ),
        (compressed({"sparsity_config": {}, "transform_config": {}}), "compressed-tensors, int4 in groups of 128"),
        (  # of 2023, before there was a quant_method
            {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "llm_int8_skip_modules": None},
            "bitsandbytes nf4",
        ),
    ],
    ids=["optimum", "gptqmodel", "transformers", "dense", "empty", "bitsandbytes"],
)
def test_what_published_checkpoints_say_is_read(config: dict[str, Any], text: str) -> None:
    assert str(layout_of(config)) == text


def test_modules_that_gptq_leaves_out_by_a_rule() -> None:
    """GPTQModel's way to leave routers and shared experts' gates in floats; patterns are beginnings of names."""
    rules = {r"-:.*\.mlp\.gate\b(?!_proj)": {}, "-:model.layers.1.": {}}
    layout = layout_of(GPTQ | {"dynamic": rules})
    assert not layout.covers("model.layers.0.mlp.gate") and not layout.covers("model.layers.1.mlp.up_proj")
    assert layout.covers("model.layers.0.mlp.gate_proj") and layout.covers("model.layers.0.model.layers.1.x")
    assert layout == GPTQLayout(skipped=(r".*\.mlp\.gate\b(?!_proj)", "model.layers.1."))
    assert layout_of(layout.config()) == layout


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "settings of their own for '+:.*down_proj'"),
        (GPTQ | {"dynamic": {".*down_proj": {"group_size": 32}}}, "dynamic with settings of their own"),
        (GPTQ | {"dynamic": {"-:(": {}}}, "dynamic with '-:(', no regular expression"),
        (GPTQ | {"dynamic": ["-:x"]}, "dynamic=['-:x']"),
        (GPTQ | {"bits": 4.0}, "bits=4.0"),
        (GPTQ | {"modules_in_block_to_quantize": 5}, "modules_in_block_to_quantize=5"),
        (GPTQ | {"modules_in_block_to_quantize": [5]}, "modules_in_block_to_quantize=[5]"),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": 5}, "modules_to_not_convert=5"),
        ({"quant_method": ["awq"]}, "quant_method=['awq']"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": "false"}, "load_in_4bit='false'"),
        (compressed({"sparsity_config": "dense"}), "sparsity_config='dense'"),
        (compressed({"ignore": 5}), "ignore=5"),
        (compressed(num_bits=4.0), "num_bits=4.0"),
        (compressed({"format": "float-quantized"}, **FP8, strategy="block", block_structure="axb"), "structure='axb'"),
        (compressed({"config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}), "none with weights"),
        (compressed({"config_groups": {"group_0": {"targets": ["Linear"], "weights": None}}}), "none with weights"),
    ],
    ids=str,
)
def test_what_is_broken_or_not_supported_is_told_by_key(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        layout_of(config)
