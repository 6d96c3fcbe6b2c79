"""EAGLE-3 heads: the module against its definition written out in numpy, and files in the published layout."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint.eagle3_head import is_eagle3, read_eagle3, write_eagle3
from jaxinfer.checkpoint.leaf_shapes import flat
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3 import Eagle3Config, Eagle3Head, default_taps, eagle3_config, init_eagle3
from jaxinfer.models.sequence import SequenceAttention

HIDDEN, TARGET, HEADS, KEYS, WIDTH, FFN, VOCAB, DRAFT, EPS = 16, 16, 4, 2, 8, 24, 50, 20, 1e-5


def published(rng: np.random.Generator, hidden: int = HIDDEN, target: int = TARGET) -> dict[str, np.ndarray]:
    """Random tensors with the names and shapes of SafeAILab's EAGLE-3 checkpoints."""
    shapes = {
        "fc.weight": (hidden, 3 * target),
        "midlayer.self_attn.q_proj.weight": (HEADS * WIDTH, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (KEYS * WIDTH, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (KEYS * WIDTH, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, HEADS * WIDTH),
        "midlayer.mlp.gate_proj.weight": (FFN, hidden),
        "midlayer.mlp.up_proj.weight": (FFN, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, FFN),
        "lm_head.weight": (DRAFT, hidden),
    }
    tensors = {name: (0.3 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    tensors |= {f"{name}.weight": rng.uniform(0.5, 1.5, hidden).astype(np.float32) for name in norms}
    ids = np.sort(rng.choice(VOCAB, DRAFT, replace=False))
    return tensors | {"d2t": ids - np.arange(DRAFT), "t2d": np.isin(np.arange(VOCAB), ids)}


def said(**more: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "head_dim": WIDTH,
        "rms_norm_eps": EPS,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT,
        **more,
    }


def written(folder: Path, tensors: dict[str, np.ndarray], **more: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(said(**more)))
    save_file(tensors, folder / "model.safetensors")
    return folder


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight


def naive(t: dict[str, np.ndarray], features: np.ndarray, embedded: np.ndarray, before: bool = False) -> np.ndarray:
    """Guessed features of [T, D], by the definition."""
    t = {name: values.astype(np.float64) for name, values in t.items()}
    length, half = len(features), WIDTH // 2
    angles = np.arange(length)[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

    def turned(x: np.ndarray) -> np.ndarray:
        return np.concatenate(
            [x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1
        )

    layer = {name.removeprefix("midlayer."): values for name, values in t.items()}
    normed = norm(features, layer["hidden_norm.weight"])
    x = np.concatenate([norm(embedded, layer["input_layernorm.weight"]), normed], -1)
    q, k, v = ((x @ layer[f"self_attn.{n}_proj.weight"].T).reshape(length, -1, WIDTH) for n in "qkv")
    q, k = turned(q), turned(k)
    mixed = np.zeros_like(q)
    for head in range(HEADS):
        key, value = k[:, head // (HEADS // KEYS)], v[:, head // (HEADS // KEYS)]
        scores = np.where(np.tril(np.ones((length, length), bool)), q[:, head] @ key.T * WIDTH**-0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[:, head] = weights / weights.sum(-1, keepdims=True) @ value
    x = (normed if before else features) + mixed.reshape(length, -1) @ layer["self_attn.o_proj.weight"].T
    inside = norm(x, layer["post_attention_layernorm.weight"])
    gate, up = (inside @ layer[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return x + (gate / (1 + np.exp(-gate)) * up) @ layer["mlp.down_proj.weight"].T


@pytest.mark.parametrize("before", [False, True])
def test_a_published_head_computes_what_its_definition_says(tmp_path: Path, before: bool) -> None:
    rng = np.random.default_rng(0)
    tensors = published(rng)
    table = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    folder = written(tmp_path, tensors | {"embed_tokens.weight": table}, norm_before_residual=before)
    found = read_eagle3(folder, 12)
    assert is_eagle3(folder)
    assert found.config.taps == (2, 6, 9) and found.config.norm_before_residual == before
    np.testing.assert_array_equal(found.token_ids, np.flatnonzero(tensors["t2d"]))
    np.testing.assert_array_equal(found.embedding, table)
    hidden = [rng.standard_normal((7, TARGET)).astype(np.float32) for _ in range(3)]
    embedded = rng.standard_normal((7, HIDDEN)).astype(np.float32)
    head, variables = Eagle3Head(found.config), {"params": found.params}
    features = head.apply(variables, hidden, method=Eagle3Head.fuse)
    np.testing.assert_allclose(features, np.concatenate(hidden, -1) @ tensors["fc.weight"].T, atol=1e-4)
    positions = np.arange(7, dtype=np.int32)
    guessed, _ = head.apply(variables, features, embedded, positions, SequenceAttention(None, 1), [None])
    expected = naive(tensors, np.asarray(features, np.float64), embedded.astype(np.float64), before)
    np.testing.assert_allclose(guessed, expected, atol=1e-3)
    logits = head.apply(variables, guessed, method=Eagle3Head.logits)
    np.testing.assert_allclose(logits, norm(expected, tensors["norm.weight"]) @ tensors["lm_head.weight"].T, atol=1e-3)


def test_other_spellings_of_the_layout(tmp_path: Path) -> None:
    """The layer as "layers.0", a table of its own beside a wider model, and both ways to say which layers are read."""
    rng = np.random.default_rng(1)
    tensors = {name.replace("midlayer", "layers.0"): values for name, values in published(rng, target=24).items()}
    tensors["embed_tokens.weight"] = rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32)
    key = "eagle_aux_hidden_state_layer_ids"
    found = read_eagle3(written(tmp_path, tensors, target_hidden_size=24, **{key: [1, 3, 5]}), 8)
    assert found.config.taps == (1, 3, 5) and found.config.own_embedding and found.embedding is None
    np.testing.assert_array_equal(found.params["embed"]["embedding"], tensors["embed_tokens.weight"])
    again = read_eagle3(written(tmp_path, tensors, target_hidden_size=24, eagle_config={key: [1, 3, 5]}), 8)
    assert again.config.taps == (2, 4, 6)


@pytest.mark.parametrize("bias", [False, True])
def test_what_is_written_is_read_again_and_is_in_the_published_layout(tmp_path: Path, bias: bool) -> None:
    model = ModelConfig(VOCAB, HIDDEN, FFN, 7, HEADS, KEYS, WIDTH)
    config = eagle3_config(model, DRAFT)
    config = replace(config, layer=replace(config.layer, qkv_bias=bias, o_bias=bias, mlp_bias=bias))
    rng = np.random.default_rng(2)
    fresh = init_eagle3(config, jax.random.key(0))
    params = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), fresh)
    ids = np.sort(rng.choice(VOCAB, DRAFT, replace=False))
    write_eagle3(tmp_path, config, params, ids, "float32")
    found = read_eagle3(tmp_path, 7)
    assert found.config == config and config.taps == (2, 3, 4)
    np.testing.assert_array_equal(found.token_ids, ids)
    for path, leaf in flat(params).items():
        np.testing.assert_array_equal(flat(found.params)[path], leaf)
    expected = {name: values.shape for name, values in published(rng).items()}
    stored = load_file(tmp_path / "model.safetensors")
    biases = {f"self_attn.{name}" for name in "qkvo"} | {f"mlp.{name}" for name in ("gate", "up", "down")}
    biases = {f"midlayer.{name}_proj.bias" for name in biases} if bias else set()
    assert stored.keys() == expected.keys() | biases
    assert {name: stored[name].shape for name in expected} == expected
    np.testing.assert_array_equal(stored["d2t"] + np.arange(DRAFT), ids)
    assert stored["t2d"].dtype == bool and stored["t2d"].sum() == DRAFT


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    tensors = published(rng)
    for name, change, message in (
        ("fc.weight", None, r"'fc.weight'.* is missing"),
        ("norm.weight", None, r"norm.weight \[16\] of an EAGLE-3 head is missing"),
        ("midlayer.self_attn.q_proj.weight", np.zeros((32, 16), np.float32), r"is \[32, 16\]; it must be \[32, 32\]"),
        ("midlayer.extra.weight", np.zeros(3, np.float32), "midlayer.extra.weight has no place"),
        ("d2t", np.full(DRAFT, VOCAB), "must ascend from 0 to below 50"),
    ):
        changed = {key: values for key, values in tensors.items() if key != name}
        folder = written(tmp_path, changed if change is None else changed | {name: change})
        with pytest.raises(ValueError, match=message):
            read_eagle3(folder, 12)
    with pytest.raises(ValueError, match="must be layers of the model, which has 4"):
        read_eagle3(written(tmp_path, tensors, eagle_aux_hidden_state_layer_ids=[1, 2, 5]), 4)
    with pytest.raises(ValueError, match="draft_vocab_size=60"):
        Eagle3Config(eagle3_config(ModelConfig(VOCAB, HIDDEN, FFN, 7, HEADS)).layer, HIDDEN, 60, (1,))


def test_layers_that_are_read_by_default() -> None:
    assert default_taps(32) == (2, 16, 29)
    assert default_taps(30) == (2, 15, 27)
    assert default_taps(6) == (0, 3, 6)
    assert default_taps(4) == (0, 2, 4)
    assert default_taps(1) == (0, 0, 1)
