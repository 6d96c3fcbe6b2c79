"""Fixtures that several test folders share: the real model, its reference outputs, and small checkpoints made here.

Nothing below uses the code under test to make its numbers: parameter trees and checkpoint files are written by hand
from the documented layouts.
"""

import gc
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig

Tree = dict[str, Any]


# Model files and compiled programs stay here between runs, also those of processes that tests start.
os.environ.setdefault("JAXINFER_CACHE_DIR", str(Path.home() / ".cache" / "jaxinfer-tests"))
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def pytest_configure() -> None:
    """Keeps compiled programs between runs: in this process only, since the engine's own default is under test."""
    import jax

    jax.config.update("jax_compilation_cache_dir", os.environ["JAXINFER_CACHE_DIR"] + "/test-programs")
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Lets go of compiled programs between test functions when there are many. XLA's CPU backend maps memory about ten
    times for each, and a process at Linux's limit (vm.max_map_count, 65,530) dies of a segmentation fault."""
    maps = Path("/proc/self/maps")
    if getattr(nextitem, "function", None) is getattr(item, "function", None) or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") > 20_000:
        import jax

        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def model_cache_dir() -> Path:
    """jaxinfer's cache folder of the tests, where built-in models are fetched to."""
    return Path(os.environ["JAXINFER_CACHE_DIR"])


@pytest.fixture(scope="session")
def smollm2_path(model_cache_dir: Path) -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 GGUF file, fetched on first use; for tests marked `real_model`."""
    from jaxinfer.checkpoint.resolve import resolve_model

    return resolve_model("smollm2-135m-instruct", cache_dir=model_cache_dir)


@pytest.fixture(scope="session")
def golden() -> Mapping[str, Any]:
    """Reference outputs of SmolLM2-135M-Instruct by transformers in float32 (tests/data/golden_smollm2.json)."""
    return json.loads((Path(__file__).parent / "data" / "golden_smollm2.json").read_text())


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """Two layers, 8 query heads on 2 KV heads, 256 tokens, untied."""
    return ModelConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )


@pytest.fixture(scope="session")
def random_params() -> Callable[..., Tree]:
    """`random_params(config, seed=0, scale=0.3)`: float32 numpy weights ~ N(0, scale), norm scales near 1."""

    def make(config: ModelConfig, seed: int = 0, scale: float = 0.3) -> Tree:
        rng = np.random.default_rng(seed)

        def fill(path: str, shape: tuple[int, ...]) -> np.ndarray:
            mean = 1.0 if path.endswith("scale") else 0.0
            return (mean + scale * rng.standard_normal(shape)).astype(np.float32)

        return _parameter_tree(config, fill)

    return make


@pytest.fixture(scope="session")
def tiny_params(tiny_config: ModelConfig, random_params: Callable[..., Tree]) -> Callable[[int], Tree]:
    """`tiny_params(seed)`: random weights for `tiny_config`; outputs depend on positions and history."""
    return lambda seed=0: random_params(tiny_config, seed)


@pytest.fixture(scope="session")
def scripted_model() -> Callable[..., tuple[ModelConfig, Tree]]:
    """`scripted_model(script, vocab_size=256)`: (config, params) of a model that says the script.

    Greedy output after `script[i]` is `script[i + 1]`, whatever came before: all projections are zero, embeddings are
    +-1, and the head's row of a token is the embedding of the token before it. Tokens must be distinct, except that the
    last may be the first again, which closes a cycle; after the last step of an open script the choice is arbitrary.
    """

    def make(script: Sequence[int], vocab_size: int = 256, **fields: Any) -> tuple[ModelConfig, Tree]:
        if len(set(script[:-1])) != len(script) - 1 or len(set(script[1:])) != len(script) - 1:
            raise ValueError(f"script={list(script)} repeats a token, so what follows it is not determined")
        sizes = {"hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = ModelConfig(vocab_size=vocab_size, **{**sizes, "max_position_embeddings": 512, **fields})
        signs = np.random.default_rng(0).integers(0, 2, (vocab_size, config.hidden_size)) * 2.0 - 1.0

        def fill(path: str, shape: tuple[int, ...]) -> np.ndarray:
            if path == "embed/embedding":
                return signs.astype(np.float32)
            return np.full(shape, 1.0 if path.endswith("scale") else 0.0, np.float32)

        params = _parameter_tree(config, fill)
        for token, follower in itertools.pairwise(script):
            params["lm_head"]["kernel"][follower] = signs[token]
        return config, params

    return make


@pytest.fixture(scope="session")
def byte_tokenizer_json() -> str:
    """A tokenizer.json of 258 tokens: the 256 bytes (id = byte), <s> = 256, </s> = 257. It adds nothing to a text."""
    return _byte_tokenizer_json()


@pytest.fixture
def write_checkpoint(tmp_path: Path, byte_tokenizer_json: str) -> Callable[..., Path]:
    """`write_checkpoint(config, params, name="model", **config_json)`: an HF directory with these weights in float32.

    Its tokenizer is that of `byte_tokenizer_json`; `config_json` overrides fields of config.json.
    """

    def write(config: ModelConfig, params: Tree, name: str = "model", **config_json: Any) -> Path:
        from safetensors.numpy import save_file

        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**_config_json(config), **config_json}))
        (folder / "tokenizer.json").write_text(byte_tokenizer_json)
        special = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
        (folder / "tokenizer_config.json").write_text(json.dumps(special))
        save_file(_hf_tensors(config, params), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return write


@pytest.fixture
def scripted_checkpoint(
    scripted_model: Callable[..., tuple[ModelConfig, Tree]], write_checkpoint: Callable[..., Path]
) -> Callable[..., Path]:
    """`scripted_checkpoint(script, name="scripted", vocab_size=258)`: `scripted_model` as an HF directory.

    Token ids below 256 are the bytes of the text, 257 is the end-of-sequence token.
    """

    def make(script: Sequence[int], name: str = "scripted", vocab_size: int = 258) -> Path:
        return write_checkpoint(*scripted_model(script, vocab_size), name=name)

    return make


def _byte_tokenizer_json() -> str:
    """Byte-level BPE without merges; bytes that do not print are spelled as GPT-2 spells them, from U+0100 up."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    printing = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("\xa1"), ord("\xac") + 1),
        *range(ord("\xae"), ord("\xff") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printing]
    spelling = {byte: chr(byte) for byte in printing} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab={spelling[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer.to_str()


def _config_json(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_theta,
        "rms_norm_eps": config.rms_norm_eps,
        "hidden_act": config.hidden_act,
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "float32",
    }


def _parameter_tree(config: ModelConfig, fill: Callable[[str, tuple[int, ...]], np.ndarray]) -> Tree:
    """The decoder's parameter tree with `fill(path, shape)` at the leaves."""
    tree: Tree = {}
    for path, shape in _parameter_shapes(config).items():
        *parents, leaf = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = fill(path, shape)
    return tree


def _parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    width, heads, ffn = config.hidden_size, config.num_key_value_heads, config.intermediate_size
    group, head_dim = config.num_query_groups, config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed/embedding": (config.vocab_size, width)}
    for i in range(config.num_hidden_layers):
        layer = {
            "attn_norm/scale": (width,),
            "attn/qkv/kernel": (heads, group + 2, head_dim, width),
            "attn/out/kernel": (width, heads, group, head_dim),
            "mlp_norm/scale": (width,),
            "mlp/gate_up/kernel": (2, ffn, width),
            "mlp/down/kernel": (width, ffn),
        }
        if config.qkv_bias:
            layer["attn/qkv/bias"] = (heads, group + 2, head_dim)
        if config.o_bias:
            layer["attn/out/bias"] = (width,)
        if config.mlp_bias:
            layer |= {"mlp/gate_up/bias": (2, ffn), "mlp/down/bias": (width,)}
        shapes |= {f"layers_{i}/{name}": shape for name, shape in layer.items()}
    shapes["final_norm/scale"] = (width,)
    if not config.tie_word_embeddings:
        shapes["lm_head/kernel"] = (config.vocab_size, width)
    return shapes


def _hf_tensors(config: ModelConfig, params: Tree) -> dict[str, np.ndarray]:
    """Llama's tensor names and layouts for a tree without biases."""
    width, group = config.hidden_size, config.num_query_groups
    tensors = {
        "model.embed_tokens.weight": params["embed"]["embedding"],
        "model.norm.weight": params["final_norm"]["scale"],
    }
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = params["lm_head"]["kernel"]
    for i in range(config.num_hidden_layers):
        layer, prefix = params[f"layers_{i}"], f"model.layers.{i}"
        qkv, gate_up = layer["attn"]["qkv"]["kernel"], layer["mlp"]["gate_up"]["kernel"]
        tensors |= {
            f"{prefix}.input_layernorm.weight": layer["attn_norm"]["scale"],
            f"{prefix}.self_attn.q_proj.weight": qkv[:, :group].reshape(-1, width),
            f"{prefix}.self_attn.k_proj.weight": qkv[:, group].reshape(-1, width),
            f"{prefix}.self_attn.v_proj.weight": qkv[:, group + 1].reshape(-1, width),
            f"{prefix}.self_attn.o_proj.weight": layer["attn"]["out"]["kernel"].reshape(width, -1),
            f"{prefix}.post_attention_layernorm.weight": layer["mlp_norm"]["scale"],
            f"{prefix}.mlp.gate_proj.weight": gate_up[0],
            f"{prefix}.mlp.up_proj.weight": gate_up[1],
            f"{prefix}.mlp.down_proj.weight": layer["mlp"]["down"]["kernel"],
        }
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
