"""Makes quantised/awq_* and gptq_*: random models whose linear layers the reference packages pack, with their logits.

Run with torch 2.13.0 and transformers 5.24.0 in an environment of their own, and three packages' sources unpacked
beside each other in a folder: autoawq-0.2.9, auto_gptq (of the 0.7.1 wheel) and gptqmodel-7.7.0. Only their modules
that pack and unpack are imported, which need nothing else; the tests read only what is committed.

    python make_packed_references.py tests/data SOURCES

`logits` in reference.npz are float32, of the weights that the package's own code dequantises with scales in float32.
"""

import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

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
TOKENS = [1, 17, 51, 45, 45, 3, 39, 63, 0, 62, 34, 7, 2, 33, 50, 26, 11, 22, 5, 5, 40, 41, 12, 60]
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""A module's tensors by suffix, and the float32 weights that they stand for."""


def packages(folder: Path) -> tuple:
    """The references' packers, imported without the rest of their packages."""

    def bare(name: str, where: Path) -> None:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(where)]

    awq, auto_gptq, gptqmodel = folder / "autoawq-0.2.9/awq", folder / "auto_gptq", folder / "gptqmodel-7.7.0/gptqmodel"
    for part in ("", "modules", "modules/linear", "utils"):
        bare(f"awq/{part}".strip("/").replace("/", "."), awq / part)
    for part in ("", "nn_modules", "nn_modules/qlinear"):
        bare(f"auto_gptq/{part}".strip("/").replace("/", "."), auto_gptq / part)
    for part in ("", "nn_modules", "utils"):
        bare(f"gptqmodel/{part}".strip("/").replace("/", "."), gptqmodel / part)
    for part in ("adapter", "adapter.adapter", "models", "models._const", "quantization"):
        sys.modules[f"gptqmodel.{part}"] = MagicMock()
    for part in ("backend", "env", "logger", "safe"):
        sys.modules[f"gptqmodel.utils.{part}"] = MagicMock()
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm
    from gptqmodel.nn_modules.qlinear import PackableQuantLinear

    return WQLinear_GEMM, dequantize_gemm, QuantLinear, PackableQuantLinear


def grid(weight: torch.Tensor, groups: torch.Tensor, bits: int, sym: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """float16 numbers as scales, and zero points, both [N, groups], from the extremes of each group; no zero point is
    0, which AutoGPTQ 0.7.1 writes over its neighbours."""
    top = 2**bits - 1
    scales, zeros = [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.min(1).values.clamp(max=0), part.max(1).values.clamp(min=0)
        scale = 2 * torch.maximum(-low, high) / top if sym else (high - low) / top
        scales.append(scale.half().float())
        zeros.append(torch.full_like(low, (top + 1) // 2) if sym else (-low / scales[-1]).round().clamp(1, top))
    return torch.stack(scales, 1), torch.stack(zeros, 1)


def awq_module(linear: torch.nn.Linear, group: int) -> Packed:
    row = linear.in_features
    width = row if group == -1 else group
    scales, zeros = grid(linear.weight.data, torch.arange(row) // width, 4, False)
    clipped = linear.weight.data.clone()
    for part in range(row // width):  # AutoAWQ clips weights to the grid before it packs them
        columns = slice(part * width, (part + 1) * width)
        scale, zero = scales[:, part, None], zeros[:, part, None]
        codes = (clipped[:, columns] / scale).round() + zero
        clipped[:, columns] = (codes.clamp(0, 15) - zero) * scale
    linear.weight.data = clipped
    packed = WQLinear_GEMM.from_linear(linear, 4, width, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    weight = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, width)
    return tensors, weight.T.contiguous()


def gptq_module(linear: torch.nn.Linear, group: int, bits: int, sym: bool, order: torch.Tensor, v2: bool) -> Packed:
    """`order`: the inputs, those of each group one after the other."""
    row, channels = linear.in_features, linear.out_features
    width = row if group == -1 else group
    groups = torch.empty(row, dtype=torch.int32)
    groups[order] = torch.arange(row, dtype=torch.int32) // width
    scales, zeros = grid(linear.weight.data, groups, bits, sym)
    codes = (linear.weight.data / scales[:, groups.long()]).round() + zeros[:, groups.long()]
    linear.weight.data = (codes.clamp(0, 2**bits - 1) - zeros[:, groups.long()]) * scales[:, groups.long()]
    if v2:
        packed = PackableQuantLinear.__new__(PackableQuantLinear)
        torch.nn.Module.__init__(packed)
        packed.bits, packed.in_features, packed.out_features = bits, row, channels
        packed.maxq, packed.pack_dtype_bits, packed.pack_factor = 2**bits - 1, 32, 32 // bits
        packed.pack_np_math_dtype, packed.pack_np_dtype = np.uint32, np.int32
        packed.planar, packed.enable_wf_unsqueeze = False, True
        packed.dequant_dtype = torch.int16 if bits == 8 else torch.int8
        packed.pack_original(linear, scales, zeros, groups)
        tensors = {name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
        packed.scales = packed.scales.float()
        return tensors, packed.dequantize_weight().T.contiguous()
    packed = QuantLinear(bits, width, row, channels, False, weight_dtype=torch.float32)
    bare = torch.nn.Linear(row, channels, bias=False)
    bare.weight.data = linear.weight.data
    packed.pack(bare, scales, zeros, groups)
    tensors = {name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    tensors["scales"] = tensors["scales"].half()
    return tensors, packed(torch.eye(row)).T.contiguous()


def logits(model: torch.nn.Module) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].float().numpy()


def make(
    folder: Path, config: object, quantization: dict, pack: Callable[[str, torch.nn.Linear], Packed | None]
) -> None:
    """Writes a checkpoint; tables are bfloat16 and norms and biases float16 numbers, so that the file is small."""
    torch.manual_seed(len(folder.name))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model = (Qwen2ForCausalLM if isinstance(config, Qwen2Config) else LlamaForCausalLM)(config).float().eval()
    stored: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(0, 0.3).add_(1.0 if "norm" in name else 0.0)
            value.copy_((value.bfloat16() if value.ndim == 2 else value.half()).float())
        for name, module in model.named_modules():
            packed = pack(name, module) if isinstance(module, torch.nn.Linear) and name != "lm_head" else None
            if packed is not None:
                module.weight.data = packed[1]
                stored |= {f"{name}.{suffix}": tensor.contiguous() for suffix, tensor in packed[0].items()}
        for name, value in model.state_dict().items():
            if not any(other.startswith(name.removesuffix("weight")) for other in stored) or name.endswith("bias"):
                stored[name] = value.bfloat16() if value.ndim == 2 else value.half()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    said = config.to_diff_dict() | {"architectures": [type(model).__name__], "torch_dtype": "float16"}
    said |= {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(said, indent=2) + "\n")
    np.savez_compressed(folder / "reference.npz", tokens=np.array(TOKENS, np.int32), logits=logits(model))


def gptq_config(bits: int, group: int, sym: bool, act_order: bool, layout: str) -> dict:
    said = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act_order}
    return said | {"checkpoint_format": layout, "damp_percent": 0.01, "true_sequential": True, "lm_head": False}


def orders(name: str, row: int) -> torch.Tensor:
    """Of act-order: the same for layers with the same activations, but not in layer 1."""
    layer, _, part = name.removeprefix("model.layers.").partition(".")
    inputs = part.replace("q_", "x_").replace("k_", "x_").replace("v_", "x_").replace("gate", "x").replace("up", "x")
    seed = sum(map(ord, part if layer == "1" else inputs))
    return torch.randperm(row, generator=torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    here = Path(sys.argv[1]) / "quantised"
    WQLinear_GEMM, dequantize_gemm, QuantLinear, PackableQuantLinear = packages(Path(sys.argv[2]))
    awq = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
    skipped = ["layers.1.mlp.down_proj"]
    make(
        here / "awq_gemm",
        LlamaConfig(**SIZES),
        awq | {"group_size": 32, "modules_to_not_convert": skipped},
        lambda name, linear: None if skipped[0] in name else awq_module(linear, 32),
    )
    make(
        here / "awq_row",
        Qwen2Config(**SIZES | {"num_hidden_layers": 1}, tie_word_embeddings=True),
        awq | {"group_size": -1, "modules_to_not_convert": None},
        lambda name, linear: awq_module(linear, -1),
    )
    make(
        here / "gptq_v1",
        Qwen2Config(**SIZES | {"num_hidden_layers": 1}),
        gptq_config(4, 32, True, False, "gptq"),
        lambda name, linear: gptq_module(linear, 32, 4, True, torch.arange(linear.in_features), False),
    )
    make(
        here / "gptq_act_order",
        LlamaConfig(**SIZES),
        gptq_config(4, 32, False, True, "gptq"),
        lambda name, linear: gptq_module(linear, 32, 4, False, orders(name, linear.in_features), False),
    )
    make(
        here / "gptq_v2_8bit",
        LlamaConfig(**SIZES | {"num_hidden_layers": 1}),
        gptq_config(8, 32, False, True, "gptq_v2"),
        lambda name, linear: gptq_module(linear, 32, 8, False, orders(name, linear.in_features), True),
    )
