"""Makes gguf/*: what llama.cpp makes of the GGUF twins of the family checkpoints, and a file with K-quants by it.

    python make_gguf_references.py FOLDER

Run with llama-cpp-python 0.3.36 and gguf 0.19.0 in an environment of their own; the tests read only what is committed.
`llama_cpp.npz` holds for each twin of `family_gguf.TWINS`, written in float32, the logits of the case's tokens and the
greedy ids that follow. `k_quants.gguf` is a one-layer llama with rows of 256 in which every K type occurs, quantised by
llama.cpp; `k_quants.npz` holds the logits of the model before that, and those of the same file turned back into float32
by llama.cpp, with the first rows of its tensors.
"""

import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from family_gguf import TWINS, changed, write_gguf
from family_weights import random_weight

NEW_TOKENS = 8
TYPES = {"attn_q": "Q2_K", "attn_k": "Q3_K", "attn_v": "Q6_K", "attn_output": "Q4_K", "token_embd": "Q6_K"}
TYPES |= {"ffn_gate": "Q2_K", "ffn_up": "Q5_K", "ffn_down": "Q3_K"}
F32, Q4_K_S = 0, 14  # of llama.cpp's file types
NUM_ROWS = 2
K_CONFIG: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "tie_word_embeddings": True,
}
K_SHAPES = {
    "model.embed_tokens.weight": (64, 256),
    "model.layers.0.input_layernorm.weight": (256,),
    "model.layers.0.self_attn.q_proj.weight": (256, 256),
    "model.layers.0.self_attn.k_proj.weight": (64, 256),
    "model.layers.0.self_attn.v_proj.weight": (64, 256),
    "model.layers.0.self_attn.o_proj.weight": (256, 256),
    "model.layers.0.post_attention_layernorm.weight": (256,),
    "model.layers.0.mlp.gate_proj.weight": (256, 256),
    "model.layers.0.mlp.up_proj.weight": (256, 256),
    "model.layers.0.mlp.down_proj.weight": (256, 256),
    "model.norm.weight": (256,),
}


class Model:
    """A GGUF file in llama.cpp, cache and all in float32, on one thread."""

    def __init__(self, path: Path) -> None:
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = 128
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        params.flash_attn_type = 0
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def logits(self, tokens: list[int], first: int) -> np.ndarray:
        """Logits of every token, the first at that position."""
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, first + i, 1, 1
            batch.seq_id[i][0] = 0
        if llama_cpp.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        shape = (self.vocab_size,)
        rows = [llama_cpp.llama_get_logits_ith(self.context, i) for i in range(len(tokens))]
        return np.stack([np.ctypeslib.as_array(row, shape=shape).copy() for row in rows])

    def run(self, tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Logits of the tokens, and the greedy ids after them."""
        logits, ids = self.logits(tokens, 0), []
        last = logits
        for _ in range(NEW_TOKENS):
            ids.append(int(last[-1].argmax()))
            last = self.logits(ids[-1:], len(tokens) + len(ids) - 1)
        return logits, np.array(ids)


def quantise(source: Path, target: Path, file_type: int, types: dict[str, str]) -> None:
    """`llama-quantize`, each tensor to the type that `types` says."""
    overrides = (llama_cpp.llama_model_tensor_override * (len(types) + 1))()
    for entry, (name, kind) in zip(overrides, types.items(), strict=False):
        entry.pattern, entry.type = name.encode(), gguf.GGMLQuantizationType[kind].value
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = file_type, 1, True
    params.tt_overrides = ctypes.cast(overrides, type(params.tt_overrides)) if types else None
    if llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise RuntimeError("llama_model_quantize failed")


def make_twins(here: Path, scratch: Path) -> dict[str, np.ndarray]:
    """Logits and greedy ids of every twin."""
    references = {}
    for name, (arch, changes) in TWINS.items():
        case = json.loads((here / "families" / f"{name}.json").read_text())
        shapes, unit_offset = case["tensors"], case["unit_offset"]
        weights = {key: random_weight(key, tuple(shape), unit_offset=unit_offset) for key, shape in shapes.items()}
        write_gguf(scratch / f"{name}.gguf", changed(case["config"], changes), weights, arch)
        logits, greedy = Model(scratch / f"{name}.gguf").run(case["tokens"])
        references |= {f"{name}.logits": logits, f"{name}.greedy": greedy}
        expected = np.load(here / "families" / f"{name}.npz")[f"logits_{len(case['tokens'])}"]
        print(f"{name}: {np.abs(logits - expected).max():.1e} from transformers' logits of the unchanged config")
    return references


def make_k_quants(target: Path, scratch: Path, tokens: list[int]) -> dict[str, np.ndarray]:
    """Writes the file with K-quants; returns its references."""
    weights = {name: random_weight(name, shape) for name, shape in K_SHAPES.items()}
    weights = {name: value * np.float32(0.5 if value.ndim == 2 else 1) for name, value in weights.items()}
    write_gguf(scratch / "k.gguf", K_CONFIG, weights, "llama")
    quantise(scratch / "k.gguf", target, Q4_K_S, TYPES)
    quantise(target, scratch / "back.gguf", F32, {})
    references = {"tokens": np.array(tokens), "unquantised": Model(scratch / "k.gguf").run(tokens)[0]}
    references["logits"], references["greedy"] = Model(scratch / "back.gguf").run(tokens)
    for tensor in gguf.GGUFReader(scratch / "back.gguf").tensors:
        if tensor.data.ndim == 2:
            references[tensor.name] = np.array(tensor.data[:NUM_ROWS])
    print({tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(target).tensors})
    print(target.stat().st_size, "bytes")
    return references


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    llama_cpp.llama_backend_init()
    tokens = [
        token % K_CONFIG["vocab_size"] for token in json.loads((folder / "families/phi3.json").read_text())["tokens"]
    ]
    with tempfile.TemporaryDirectory() as name:
        np.savez_compressed(folder / "gguf" / "llama_cpp.npz", **make_twins(folder, Path(name)))
        quants = make_k_quants(folder / "gguf" / "k_quants.gguf", Path(name), tokens)
        np.savez_compressed(folder / "gguf" / "k_quants.npz", **quants)
