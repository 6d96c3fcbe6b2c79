"""The full-size models have as many parameters as their publishers say; nothing is allocated."""

from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.models.registry import family_of_hf_config
from jaxinfer.planning.formulas import count_parameters


def sizes(
    vocab: int, hidden: int, ffn: int, layers: int, heads: int, kv_heads: int | None = None, **more: Any
) -> dict[str, Any]:
    """A config.json's sizes."""
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or heads,
        **more,
    }


GPT2 = {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "Llama-2-7B": ("Llama", sizes(32000, 4096, 11008, 32, 32), 6_738_415_616),
    "Llama-2-70B": ("Llama", sizes(32000, 8192, 28672, 80, 64, 8), 68_976_648_192),
    "Llama-3-8B": ("Llama", sizes(128256, 4096, 14336, 32, 32, 8), 8_030_261_248),
    "Llama-3-70B": ("Llama", sizes(128256, 8192, 28672, 80, 64, 8), 70_553_706_496),
    "Mistral-7B": ("Mistral", sizes(32000, 4096, 14336, 32, 32, 8), 7_241_732_096),
    "Mixtral-8x7B": ("Mixtral", sizes(32000, 4096, 14336, 32, 32, 8, num_local_experts=8), 46_702_792_704),
    "Qwen2.5-7B": ("Qwen2", sizes(152064, 3584, 18944, 28, 28, 4), 7_615_616_512),
    "Qwen3-0.6B": (
        "Qwen3",
        sizes(151936, 1024, 3072, 28, 16, 8, head_dim=128, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen3-8B": ("Qwen3", sizes(151936, 4096, 12288, 36, 32, 8, head_dim=128), 8_190_735_360),
    "Qwen3-32B": ("Qwen3", sizes(151936, 5120, 25600, 64, 64, 8, head_dim=128), 32_762_123_264),
    "Qwen3-30B-A3B": (
        "Qwen3Moe",
        sizes(151936, 2048, 6144, 48, 32, 4, head_dim=128, num_experts=128, moe_intermediate_size=768),
        30_532_122_624,
    ),
    # 12_187_325_040 with the vision tower and its projector.
    "Gemma-3-12B": ("Gemma3", sizes(262208, 3840, 15360, 48, 16, 8, sliding_window=1024), 11_766_034_176),
    "Gemma-2-9B": ("Gemma2", sizes(256000, 3584, 14336, 42, 16, 8), 9_241_705_984),
    "Phi-4": ("Phi3", sizes(100352, 5120, 17920, 40, 40, 10), 14_659_507_200),
    "GPT-2": ("GPT2", GPT2, 124_439_808),
    "Pythia-6.9B": ("GPTNeoX", sizes(50432, 4096, 16384, 32, 32), 6_857_302_016),
    "SmolLM3-3B": ("SmolLM3", sizes(128256, 2048, 11008, 36, 16, 4), 3_075_098_624),
    "Command-R": ("Cohere", sizes(256000, 8192, 22528, 40, 64), 34_980_831_232),
    "Qwen1.5-MoE-A2.7B": ("Qwen2Moe", sizes(151936, 2048, 5632, 24, 16), 14_315_784_192),
    "StableLM-2-1.6B": ("StableLm", sizes(100352, 2048, 5632, 24, 32, use_qkv_bias=True), 1_644_515_328),
    "OLMo-2-7B": ("Olmo2", sizes(100352, 4096, 11008, 32, 32), 7_298_617_344),
}


def config_of(name: str) -> ModelConfig:
    architecture, config, _ = MODELS[name]
    suffix = "LMHeadModel" if architecture == "GPT2" else "ForCausalLM"
    merged = {"architectures": [architecture + suffix], **config}
    return family_of_hf_config(merged).model_config(merged)


@pytest.mark.parametrize("name", MODELS)
def test_number_of_parameters(name: str) -> None:
    leaves = jax.tree.leaves(param_shapes(config_of(name), "bfloat16"))
    assert sum(int(np.prod(leaf.shape)) for leaf in leaves) == MODELS[name][2]
    assert count_parameters(config_of(name)).total == MODELS[name][2]
