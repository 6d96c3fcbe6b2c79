"""Makes families/*: configs, tensor names, logits and greedy ids of tiny checkpoints, by transformers in float32.

    python make_family_references.py FOLDER [CASE ...]

Run with torch 2.13.0 and transformers 5.24.0 in an environment of their own; the tests read only what is committed, and
make the weights again with `family_weights.random_weight`. A case is written as transformers saves it: config.json's
mapping, the names and shapes of the tensors, the logits of the first so many tokens, and how far from those of all
tokens transformers' own are when it computes in bfloat16 (mean of the absolute difference).
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from family_weights import random_weight
from safetensors import safe_open
from safetensors.numpy import save_file

TOKENS = [1, 17, 91, 45, 45, 3, 89, 54, 0, 28, 64, 7, 2, 33, 50, 76, 11, 22, 5, 5, 80, 91, 12, 60]
NEW_TOKENS = 8
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EDGES = (12, 16, 17, 24)  # below, at and above 16 positions
LONG_EDGES = (40, 64, 65, 100)  # of 64 positions


def llama_rope(**rope: Any) -> dict[str, Any]:
    """A Llama of head_dim 8 with scaled frequencies."""
    return SIZES | {"model": "Llama", "num_attention_heads": 8, "rope_parameters": {"rope_theta": 1e4, **rope}}


GEMMA = SIZES | {"hidden_size": 72, "head_dim": 16}
GEMMA2 = GEMMA | {"model": "Gemma2", "num_hidden_layers": 4, "query_pre_attn_scalar": 20, "sliding_window": 8}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 6.0, 8.0],
}
MOE = SIZES | {"moe_intermediate_size": 40, "num_experts": 6, "num_experts_per_tok": 2}
GPT2 = {
    "model": "GPT2",
    "vocab_size": 96,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CASES: dict[str, dict[str, Any]] = {
    "mistral": SIZES | {"model": "Mistral", "sliding_window": 8, "head_dim": 16},
    "qwen2": SIZES
    | {"model": "Qwen2", "num_hidden_layers": 3}
    | {"use_sliding_window": True, "sliding_window": 10, "max_window_layers": 2},
    "qwen3": SIZES
    | {"model": "Qwen3", "head_dim": 32, "num_hidden_layers": 3}
    | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "gemma": GEMMA | {"model": "Gemma"},
    "gemma2": GEMMA2 | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    # Logits of up to 100 before the cap: far above, around and below.
    "gemma2_saturated": GEMMA2
    | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0, "scales": {"model.embed_tokens.weight": 10.0}},
    "gemma2_uncapped": GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    "gemma3": GEMMA
    | {"model": "Gemma3", "num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 3}
    | {"rope_theta": 1e4, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "phi3": SIZES | {"model": "Phi3", "sliding_window": 9},
    "phi3_longrope": SIZES
    | {"model": "Phi3", "max_position_embeddings": 64, "original_max_position_embeddings": 16}
    | {"partial_rotary_factor": 0.75, "rope_parameters": LONG, "tie_word_embeddings": True, "lengths": EDGES},
    "granite": SIZES
    | {"model": "Granite", "embedding_multiplier": 6.0, "attention_multiplier": 0.1, "residual_multiplier": 0.3}
    | {"logits_scaling": 4.0},
    "olmo2": SIZES | {"model": "Olmo2"},
    "smollm3": SIZES | {"model": "SmolLM3", "num_hidden_layers": 4, "no_rope_layer_interval": 2},
    "cohere": SIZES | {"model": "Cohere"},
    "cohere_qk_norm": SIZES | {"model": "Cohere", "use_qk_norm": True, "attention_bias": True, "logit_scale": 0.5},
    "cohere2": SIZES | {"model": "Cohere2", "num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 2},
    "stablelm": SIZES | {"model": "StableLm", "use_qkv_bias": True, "qk_layernorm": True},
    "stablelm_parallel": SIZES | {"model": "StableLm", "use_parallel_residual": True, "partial_rotary_factor": 0.5},
    "gpt2": GPT2,
    "gpt_neox": SIZES | {"model": "GPTNeoX"},
    "gpt_neox_sequential": SIZES | {"model": "GPTNeoX", "use_parallel_residual": False, "rotary_pct": 0.5},
    "mixtral": SIZES | {"model": "Mixtral", "num_local_experts": 5, "num_experts_per_tok": 2},
    "qwen2_moe": MOE
    | {"model": "Qwen2Moe", "num_hidden_layers": 3, "shared_expert_intermediate_size": 48, "mlp_only_layers": [1]},
    "qwen2_moe_all": MOE | {"model": "Qwen2Moe", "shared_expert_intermediate_size": 48, "norm_topk_prob": False},
    "qwen3_moe": MOE
    | {"model": "Qwen3Moe", "num_hidden_layers": 3, "norm_topk_prob": True, "decoder_sparse_step": 2, "head_dim": 16},
    "qwen3_moe_unnormalised": MOE | {"model": "Qwen3Moe", "norm_topk_prob": False, "head_dim": 16},
    "llama_linear": llama_rope(rope_type="linear", factor=4.0),
    "llama_llama3": llama_rope(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=128
    ),
    "llama_yarn": llama_rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64),
    "llama_yarn_attention": llama_rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, attention_factor=1.0
    ),
    "llama_yarn_mscale": llama_rope(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.5
    ),
    "llama_dynamic_edges": llama_rope(rope_type="dynamic", factor=4.0)
    | {"max_position_embeddings": 64, "vocab_size": 32, "lengths": LONG_EDGES}
    | {"tokens": [(7 * i * i + 3 * i) % 32 for i in range(LONG_EDGES[-1])]},
    "llama_dynamic": llama_rope(rope_type="dynamic", factor=4.0) | {"max_position_embeddings": 16, "lengths": EDGES},
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
VISION = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"patch_size": 14, "image_size": 56}
# Text models inside of models that see: config class, its text model's case, and the rest of its config.
WRAPPED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3_wrapped": ("Gemma3", "gemma3", {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "mistral3_wrapped": (
        "Mistral3",
        "mistral",
        {"vision_config": VISION | {"head_dim": 16, "model_type": "pixtral"}} | {"tie_word_embeddings": False},
    ),
}


def make(folder: Path, name: str, settings: dict[str, Any]) -> None:
    """Writes one case."""
    settings = dict(settings)
    model_name, scales, tokens = settings.pop("model"), settings.pop("scales", {}), settings.pop("tokens", TOKENS)
    lengths = settings.pop("lengths", (len(tokens),))
    config = getattr(transformers, CONFIGS.get(model_name, f"{model_name}Config"))(**settings)
    suffix = "LMHeadModel" if model_name == "GPT2" else "ForCausalLM"
    if name in WRAPPED:
        model_name, _, others = WRAPPED[name]
        config = getattr(transformers, f"{model_name}Config")(text_config=config.to_dict(), **others)
        suffix = "ForConditionalGeneration"
    model_class = getattr(transformers, model_name + suffix)
    with tempfile.TemporaryDirectory() as scratch:
        model_class(config).save_pretrained(scratch)
        weights = Path(scratch) / "model.safetensors"
        with safe_open(weights, "np") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in sorted(file.keys())}
        unit_offset = model_name.startswith("Gemma")
        values = {key: random_weight(key, tuple(shape), unit_offset=unit_offset) for key, shape in shapes.items()}
        values |= {key: values[key] * np.float32(scale) for key, scale in scales.items()}
        save_file(values, weights, {"format": "pt"})
        model, coarse = (
            model_class.from_pretrained(scratch, dtype=dtype, attn_implementation="eager").eval()
            for dtype in (torch.float32, torch.bfloat16)
        )
        saved = json.loads((Path(scratch) / "config.json").read_text())
    ids = torch.tensor([tokens])
    reference = {}
    with torch.no_grad():
        for length in lengths:
            reference[f"logits_{length}"] = model(ids[:, :length]).logits[0].numpy()
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        greedy = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, **options)
        exact = reference[f"logits_{lengths[-1]}"]
        rounded = coarse(ids[:, : lengths[-1]]).logits[0].float().numpy()
    reference["bfloat16_error"] = np.abs(rounded - exact).mean()
    greedy_ids = greedy[0, len(tokens) :].tolist() if len(lengths) == 1 else []
    description = {"config": saved, "unit_offset": unit_offset, "tokens": tokens, "greedy": greedy_ids}
    description |= {"scales": scales} if scales else {}
    text = json.dumps(description | {"tensors": shapes}, indent=None, separators=(", ", ": "))
    (folder / f"{name}.json").write_text(text + "\n")
    np.savez_compressed(folder / f"{name}.npz", **reference)
    spread, error = np.diff(np.sort(exact)[:, -2:]).min(), reference["bfloat16_error"] / np.abs(exact).mean()
    print(f"{name}: {len(shapes)} tensors, least gap of the two best logits {spread:.1e}, bfloat16 off by {error:.1%}")


if __name__ == "__main__":
    for case in sys.argv[2:] or [*CASES, *WRAPPED]:
        make(Path(sys.argv[1]), case, CASES[WRAPPED[case][1] if case in WRAPPED else case])
