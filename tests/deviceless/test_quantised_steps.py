"""Steps on quantised weights, compiled for a GPU that is not here: no matrix is copied in 16 bits."""

import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.deviceless import gpu_target
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.quant.storage import Method
from jaxinfer.runner.deviceless_step import compile_step
from jaxinfer.runner.inputs import StepSpec

MIB = 1 << 20
LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=3,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=5e5,
)
DECODE = StepSpec(num_tokens=32, num_rows=32, table_width=512, sampler=False)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_matrices_stay_in_their_codes(method: Method) -> None:
    step = compile_step(gpu_target("h200"), LLAMA_8B, DECODE, plan=QuantPlan(method))
    assert step.report.temp_bytes < 32 * MIB
    assert step.report.alias_bytes == step.donated_bytes
    assert max(map(len, step.layers())) <= 13
    matrices = 3 * 4096 * (6144 + 4096 + 3 * 14336)
    floats = 2 * (2 * 128256 * 4096 + 7 * 4096)
    bits = {"int8": 8, "int4": 4 + 32 / 128}[method]
    scales = {"int8": 4 * 3 * (6144 + 4096 + 2 * 14336 + 4096), "int4": 0}[method]
    assert step.param_bytes == matrices * bits / 8 + scales + floats
