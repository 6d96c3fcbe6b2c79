"""Makes the tiny_* folders: random checkpoints saved by transformers, with its float32 logits.

Run with torch 2.13.0 and transformers 5.24.0 in an environment of their own; the tests read only what is committed.
Matrices are stored in bfloat16, the embedding in float16, norms and biases in float32: small files, and mixed types.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
TOKENS = [1, 17, 201, 45, 45, 3, 99, 254, 0, 128, 64, 7, 2, 33, 150, 76, 11, 222, 5, 5, 180, 91, 12, 60]


def stored(name: str, value: torch.Tensor) -> torch.Tensor:
    if name == "model.embed_tokens.weight":
        return value.half()
    return value.bfloat16() if value.ndim == 2 else value.float()


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].numpy()


def make(folder: Path, model_class: type, config: object) -> None:
    torch.manual_seed(len(folder.name))
    config._attn_implementation = "eager"
    model = model_class(config).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(0, 0.3).add_(1.0 if "norm" in name else 0.0)
    model.save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file({name: stored(name, value) for name, value in load_file(weights).items()}, weights, {"format": "pt"})
    arguments = {"dtype": torch.float32, "attn_implementation": "eager"}
    reference = {
        "tokens": np.array(TOKENS, np.int32),
        "logits": logits(model_class.from_pretrained(folder, **arguments)),
    }
    if folder.name == "tiny_llama":
        # The same weights with llama3 rope scaling, which GGUF files express as divisors of the frequencies.
        scaling = {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
        scaling["original_max_position_embeddings"] = 128
        scaled = model_class.from_pretrained(folder, rope_parameters=scaling, **arguments)
        plain = model_class.from_pretrained(folder, **arguments)
        ratio = plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq
        reference |= {"rope_factors": ratio.numpy(), "scaled_logits": logits(scaled)}
    np.savez_compressed(folder / "reference.npz", **reference)


if __name__ == "__main__":
    here = Path(sys.argv[1])
    make(here / "tiny_llama", LlamaForCausalLM, LlamaConfig(**SIZES, rms_norm_eps=1e-5))
    make(
        here / "tiny_llama_tied", LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True, attention_bias=True)
    )
    make(here / "tiny_qwen2", Qwen2ForCausalLM, Qwen2Config(**SIZES))
