"""Makes quantised/ct_*, bnb_* and fp8_*: random Llamas written by the packages that define those layouts, with logits.

Run with torch 2.13.0, transformers 5.24.0, compressed-tensors 0.20.1 and bitsandbytes 0.50.2 on a CPU, in an
environment of their own; the tests read only what is committed. `logits` in reference.npz are float32, of the weights
that the package itself dequantises and of activations that are not rounded; `rounded_logits` are the package's with
activations rounded to 8 bits as the checkpoint says, where there are any.
"""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "attn_implementation": "eager",
}
WIDE = SIZES | {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 1, "head_dim": 16}
TOKENS = [1, 17, 51, 45, 45, 3, 39, 63, 0, 62, 34, 7, 2, 33, 50, 26, 11, 22, 5, 5, 40, 41, 12, 60]
INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FLOAT8_TOKENS = INT8_TOKENS | {"type": "float"}


def tiny_llama(sizes: dict, seed: int) -> LlamaForCausalLM:
    """Tables are bfloat16 numbers, so that their file is small; a few channels are much larger than others."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).float().eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(0, 0.08).add_(1.0 if "norm" in name else 0.0)
            if value.ndim == 2:
                value[:3] *= 4
            value.copy_(value.bfloat16().float())
    return model


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].float().numpy()


def keep(folder: Path, **arrays: np.ndarray) -> None:
    """Makes the file smaller by what loses nothing, and writes the reference."""
    weights = folder / "model.safetensors"
    tables = ("model.embed_tokens.weight", "lm_head.weight")
    stored = {name: value.bfloat16() if name in tables else value for name, value in load_file(weights).items()}
    save_file(stored, weights, {"format": "pt"})
    (folder / "generation_config.json").unlink(missing_ok=True)
    np.savez_compressed(folder / "reference.npz", tokens=np.array(TOKENS, np.int32), **arrays)


def compressed_tensors(folder: Path, groups: dict, layout: str, seed: int) -> None:
    model = tiny_llama(SIZES, seed)
    config = {"config_groups": groups, "format": layout, "ignore": ["lm_head"], "quantization_status": "initialized"}
    apply_quantization_config(model, QuantizationConfig.model_validate(config))
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None:
            continue
        values = module.weight.data
        if scheme.weights.strategy == "tensor":
            values = values.reshape(1, -1)
        if scheme.weights.strategy == "group":
            values = values.unflatten(1, (-1, scheme.weights.group_size))
        scale, zero = calculate_qparams(values.amin(-1), values.amax(-1), scheme.weights)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape)
        module.weight_zero_point.data = zero.reshape(module.weight_zero_point.shape)
        if scheme.input_activations is not None and not scheme.input_activations.dynamic:
            module.input_scale.data.fill_(0.1)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    if all(group["weights"].get("symmetric", True) for group in groups.values()):
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        rounded = logits(model)
    else:  # transformers 5.24 does not load packed zero points
        compressor.decompress_model(model)
        rounded = logits(model)
    for module in model.modules():
        module.quantization_enabled = False
    exact = logits(model)
    keep(folder, logits=exact, **({} if np.array_equal(rounded, exact) else {"rounded_logits": rounded}))


def bitsandbytes(folder: Path, config: BitsAndBytesConfig, seed: int) -> None:
    floats = folder.with_name("floats")
    # bitsandbytes 0.50.2 takes wrong scales on a CPU for 4-bit rows that are no multiple of its blocks of 64.
    tiny_llama(SIZES | {"intermediate_size": 128}, seed).save_pretrained(floats)
    arguments = {"dtype": torch.float32, "attn_implementation": "eager", "device_map": "cpu"}
    LlamaForCausalLM.from_pretrained(floats, quantization_config=config, **arguments).save_pretrained(folder)
    shutil.rmtree(floats)
    loaded = LlamaForCausalLM.from_pretrained(folder, **arguments)
    rounded = {"rounded_logits": logits(loaded)} if config.load_in_8bit else {}
    exact = logits(loaded.dequantize(dtype=torch.float32))
    keep(folder, logits=exact, **rounded)


def fp8_blocks(folder: Path, seed: int) -> None:
    """As DeepSeek's converter writes it: blocks of 128 by 128 that end where the matrix does.

    transformers takes blocks of 192 / 2 there, so the weights are dequantised here, by DeepSeek's rule.
    """
    model = tiny_llama(WIDE, seed)
    stored = {}
    for name, value in model.state_dict().items():
        if value.ndim != 2 or name in ("model.embed_tokens.weight", "lm_head.weight"):
            stored[name] = value
            continue
        scale = torch.empty(-(-value.shape[0] // 128), -(-value.shape[1] // 128))
        codes = torch.empty_like(value, dtype=torch.float8_e4m3fn)
        for i, j in np.ndindex(*scale.shape):
            block = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scale[i, j] = value[block].abs().max() / 448
            codes[block] = (value[block] / scale[i, j]).to(torch.float8_e4m3fn)
            value[block] = codes[block].float() * scale[i, j]
        stored |= {name: codes, name.removesuffix("weight") + "weight_scale_inv": scale}
    model.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.norm"],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    keep(folder, logits=logits(model))


def main(here: Path) -> None:
    here.mkdir(parents=True, exist_ok=True)
    linear = {"targets": ["Linear"]}
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    mlp8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False}
    compressed_tensors(here / "ct_w4a16", {"group_0": linear | {"weights": int4}}, "pack-quantized", 1)
    mixed = {
        "group_0": {"targets": ["re:.*self_attn.*"], "weights": int4 | {"symmetric": False}},
        "group_1": {"targets": ["Linear"], "weights": mlp8},
    }
    compressed_tensors(here / "ct_mixed", mixed, "pack-quantized", 2)
    int8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
    w8a8 = {"group_0": linear | {"weights": int8, "input_activations": INT8_TOKENS}}
    compressed_tensors(here / "ct_w8a8", w8a8, "int-quantized", 3)
    float8 = int8 | {"type": "float"}
    fp8 = {"group_0": linear | {"weights": float8, "input_activations": FLOAT8_TOKENS}}
    compressed_tensors(here / "ct_fp8", fp8, "float-quantized", 4)
    static = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    fp8_static = {"group_0": linear | {"weights": static, "input_activations": static}}
    compressed_tensors(here / "ct_fp8_static", fp8_static, "float-quantized", 5)
    bitsandbytes(here / "bnb_int8", BitsAndBytesConfig(load_in_8bit=True), 6)
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    bitsandbytes(here / "bnb_nf4", nf4, 7)
    bitsandbytes(here / "bnb_fp4", BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"), 8)
    fp8_blocks(here / "fp8_block", 9)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
