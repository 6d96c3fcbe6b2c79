"""Parameters that stay in floats because of the modules in them."""

from pathlib import Path

import pytest

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.checkpoint.skipped_parameters import skipped_parameters
from jaxinfer.models.config import ModelConfig
from jaxinfer.startup.quantization import QuantOptions, quant_plan

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["down_proj"], {"layers_0/mlp/down/kernel", "layers_1/mlp/down/kernel"}),
        (["model.layers.1.self_attn"], {"layers_1/attn/qkv/kernel", "layers_1/attn/out/kernel"}),
        (["k_proj"], {"layers_0/attn/qkv/kernel", "layers_1/attn/qkv/kernel"}),  # fused with others
        ([r"model\.layers\.0\.mlp\.(gate|up)_proj"], {"layers_0/mlp/gate_up/kernel"}),
        (["lm_head"], {"lm_head/kernel"}),
        ([], set()),
    ],
)
def test_of_a_checkpoint(patterns: list[str], expected: set[str]) -> None:
    checkpoint = open_checkpoint(DATA / "tiny_llama")
    assert skipped_parameters(patterns, checkpoint.model_config, checkpoint) == expected


def test_tied_heads_and_live_parameters() -> None:
    model = ModelConfig(8, 16, 32, 1, 2, tie_word_embeddings=True)
    found = skipped_parameters(["layers_0.mlp", "lm_head"], model, None)
    assert found == {"layers_0/mlp/gate_up/kernel", "layers_0/mlp/down/kernel", "embed/embedding"}


def test_a_pattern_for_nothing_is_told() -> None:
    checkpoint = open_checkpoint(DATA / "tiny_llama")
    with pytest.warns(UserWarning, match=r"\['w1'\] name no module of the model; they are like 'model"):
        assert not skipped_parameters(["w1"], checkpoint.model_config, checkpoint)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_plans_leave_them_in_floats(platform: str) -> None:
    checkpoint = open_checkpoint(DATA / "tiny_llama")
    options = QuantOptions(skip_modules=("down_proj", "lm_head"), quantize_head=True)
    plan = quant_plan("int8", options, checkpoint.model_config, checkpoint, platform)
    assert plan is not None
    assert (
        plan.stored("layers_0/mlp/down/kernel", (64, 128)) is None and plan.stored("lm_head/kernel", (512, 64)) is None
    )
    assert plan.stored("layers_0/attn/out/kernel", (64, 64)) is not None
