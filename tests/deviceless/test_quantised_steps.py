"""Steps on quantised weights, compiled for GPUs that are not here: no matrix is copied in floats, few launches."""

from dataclasses import dataclass, replace

import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.deviceless import gpu_target
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.quant.storage import Storage
from jaxinfer.runner.deviceless_step import DevicelessStep, compile_step
from jaxinfer.runner.inputs import StepSpec

MIB = 1 << 20
NUM_LAYERS = 4
LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=NUM_LAYERS,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=5e5,
)
DECODE = StepSpec(num_tokens=32, num_rows=32, table_width=512, sampler=False)
MATRICES = {"attn/qkv": (6144, 4096), "attn/out": (4096, 4096), "mlp/gate_up": (28672, 4096), "mlp/down": (4096, 14336)}
FLOAT_BYTES = 2 * (2 * 128256 * 4096 + (2 * NUM_LAYERS + 1) * 4096)


@dataclass(frozen=True)
class Format:
    """How the layers' matrices are stored.

    `bits` of a weight, with what its group has. `channel`, `row`, `matrix`: bytes more for each output channel, input,
    and matrix; `down` those of the last one's groups, for each output and all of its inputs.
    """

    plan: QuantPlan
    bits: float
    channel: int = 0
    row: int = 0
    matrix: int = 0
    down: int = 0
    limit: int = 11

    @property
    def num_bytes(self) -> float:
        sizes = MATRICES.values()
        each = (n * k * self.bits / 8 + n * self.channel + k * self.row + self.matrix for n, k in sizes)
        down = MATRICES["mlp/down"][0] * (self.down - self.channel) if self.down else 0
        return NUM_LAYERS * (sum(each) + down) + FLOAT_BYTES


def kept(storage: Storage) -> QuantPlan:
    """All matrices in one format, as a checkpoint has them."""
    paths = (f"layers_{index}/{name}/kernel" for index in range(NUM_LAYERS) for name in MATRICES)
    return QuantPlan("gguf", kept=dict.fromkeys(paths, storage))


FORMATS = {
    "int8": Format(QuantPlan("int8", down_group=64), 8, channel=4, down=4 * 14336 // 64),
    "int8_w8a8": Format(QuantPlan("int8_w8a8"), 8, channel=4, limit=12),
    "fp8": Format(QuantPlan("fp8"), 8, channel=4, limit=12),
    "fp8 in blocks": Format(kept(Storage("fp8", 128)), 8 + 32 / 128),
    "int8 in groups": Format(kept(Storage("int8", 32)), 8 + 32 / 32),
    "int4": Format(QuantPlan("int4"), 4 + (16 + 16) / 128),
    "int4 asymmetric": Format(QuantPlan("int4", 64, symmetric=False), 4 + (16 + 32) / 64),
    "int4 ordered": Format(kept(Storage("int4", 128, symmetric=False, ordered=True)), 4 + (16 + 32) / 128, row=4),
    "nf4": Format(QuantPlan("nf4"), 4 + 32 / 64, matrix=4 * 16),
    "nf4 double": Format(QuantPlan("nf4", double=True), 4 + (8 + 32 / 256) / 64, matrix=4 * (16 + 1 + 256)),
}
ON = {
    "a100-80g": ("int8", "int8_w8a8", "fp8", "fp8 in blocks", "int4 asymmetric", "int4 ordered"),
    "rtx4090": ("fp8", "int8_w8a8", "int4", "nf4"),
    "h100": ("fp8 in blocks", "int8 in groups", "nf4 double", "int4 ordered"),
    "h200": tuple(FORMATS),
}
CASES = [(gpu, name) for gpu, names in ON.items() for name in names]


def compiled(gpu: str, name: str, spec: StepSpec = DECODE, num_layers: int = NUM_LAYERS) -> DevicelessStep:
    config = replace(LLAMA_8B, num_hidden_layers=num_layers)
    return compile_step(gpu_target(gpu), config, spec, plan=FORMATS[name].plan)


@pytest.mark.parametrize(("gpu", "name"), CASES)
def test_matrices_stay_in_their_codes(gpu: str, name: str) -> None:
    step, expected = compiled(gpu, name), FORMATS[name]
    assert step.report.temp_bytes < 32 * MIB
    assert step.report.alias_bytes == step.donated_bytes
    assert step.param_bytes == expected.num_bytes
    assert max(map(len, step.layers())) <= expected.limit
    assert {kernel.spill_bytes for kernel in step.report.kernels} == {0}
    assert step.report.num_command_buffers == 1 and step.report.launches_outside_graphs() == ()


@pytest.mark.parametrize(
    ("gpu", "name"), [("a100-80g", "fp8"), ("h100", "int4 ordered"), ("rtx4090", "nf4 double"), ("h200", "int8_w8a8")]
)
def test_chunks_of_prompts_copy_no_matrix(gpu: str, name: str) -> None:
    tokens = 512
    step = compiled(gpu, name, replace(DECODE, num_tokens=tokens), 2)
    rounds = FORMATS[name].limit == 12 and gpu != "a100-80g"
    # Gate and up in 32 bits where activations are rounded; beside them the residual stream and what gates.
    values = tokens * (2 * (4 if rounds else 2) * 14336 + 2 * 14336 + 3 * 2 * 4096)
    assert step.report.temp_bytes < values + 16 * MIB
    assert {kernel.spill_bytes for kernel in step.report.kernels} == {0}
