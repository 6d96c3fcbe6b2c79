"""A step's memory by hand; that XLA agrees is in tests/deviceless."""

from jaxinfer.planning import PRESETS
from jaxinfer.planning.step_memory import step_memory

LLAMA_8B = PRESETS["llama-3-8b"]
MIB = 2**20


def test_a_step_of_llama_3_8b() -> None:
    """8,192 tokens: the residual stream, gate, up and their product in bfloat16, and cuBLAS's workspace; 256 rows of
    float32 logits."""
    memory = step_memory(LLAMA_8B, num_tokens=8192, num_rows=256, table_width=512)
    assert memory.scratch == 8192 * 2 * (4096 + 3 * 14336) + 4 * MIB == 740 * MIB
    logits = 4 * 256 * 128256
    assert memory.state == 2 * logits + 4 * 256
    assert memory.logits == 2 * logits
    assert 4 * (4 * 8192 + 256 * 512) < memory.inputs < 2 * MIB
    assert memory.total == memory.scratch + memory.state + memory.logits + memory.inputs


def test_rounded_activations() -> None:
    """W8A8: gate and up come out in 32 bits, and the normed residual stream is there beside its codes."""
    memory = step_memory(LLAMA_8B, num_tokens=8192, num_rows=256, table_width=512, rounds=True)
    assert memory.scratch == 8192 * (2 * 2 * 4096 + 2 * 4 * 14336 + 2 * 14336) + 4 * MIB


def test_many_rows_are_the_samplers() -> None:
    memory = step_memory(LLAMA_8B, num_tokens=1024, num_rows=1024, table_width=512)
    assert memory.scratch == 5 * 4 * 1024 * 128256


def test_devices_share_the_channels() -> None:
    sizes = {"num_tokens": 8192, "num_rows": 1, "table_width": 512}
    halves = step_memory(LLAMA_8B, **sizes, tp=2)
    assert halves.scratch == 8192 * 2 * (2 * 4096 + 3 * 14336 // 2) + 4 * MIB
    assert step_memory(LLAMA_8B, **sizes, itemsize=4).scratch == (2 * 736 + 4) * MIB


def test_experts_take_slices_of_the_tokens() -> None:
    """Mixtral: all experts' gate and up of 8,192 tokens are 14 times 2**27 values; in 16 slices of 512 tokens."""
    sizes = {"num_tokens": 8192, "num_rows": 1, "table_width": 512}
    memory = step_memory(PRESETS["mixtral-8x7b"], **sizes)
    assert memory.scratch == 2 * (3 * 512 * 8 * 14336 + 3 * 8192 * 4096) + 4 * MIB


def test_a_feed_forward_without_a_gate() -> None:
    """Pythia: the hidden layer and the result beside the residual stream."""
    memory = step_memory(PRESETS["pythia-6.9b"], num_tokens=8192, num_rows=1, table_width=64)
    assert memory.scratch == 8192 * 2 * (16384 + 2 * 4096) + 4 * MIB
