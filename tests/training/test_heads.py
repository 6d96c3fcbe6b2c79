"""Medusa and EAGLE heads: their losses by hand, runs in which they fall, and the files that are written."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxinfer.checkpoint.eagle_head import read_eagle
from jaxinfer.checkpoint.leaf_shapes import flat
from jaxinfer.checkpoint.medusa_heads import read_medusa
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle import eagle_config
from jaxinfer.models.medusa import MedusaConfig, MedusaHeads, init_medusa
from jaxinfer.models.sequence import SequenceDecoder
from jaxinfer.training.corpus import DataOptions
from jaxinfer.training.features import cut_output, model_features
from jaxinfer.training.head_kinds import Eagle, Medusa
from jaxinfer.training.head_losses import EagleLoss, MedusaLoss
from jaxinfer.training.heads import train_heads
from jaxinfer.training.packing import PADDING

pytestmark = pytest.mark.filterwarnings("ignore:loss.png was not drawn")
IDS = np.array([[5, 1, 7, 2, 9, 4, 3, 8], [3, 3, 8, 1, 0, 6, 0, 0]], np.int32)
SEGMENTS = np.array([[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, PADDING, PADDING]], np.int32)


def log_softmax(logits: Any) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def features_and_logits(config: ModelConfig, params: Any) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
    """The model's last hidden states after its norm, by its definition, and its output head."""
    run = jax.jit(SequenceDecoder(config).hidden)
    x = np.asarray(run(params, IDS, SEGMENTS), np.float64)
    normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * params["final_norm"]["scale"]
    return normed, lambda hidden: hidden @ params["lm_head"]["kernel"].astype(np.float64).T


def test_medusa_loss_by_hand(small_config: ModelConfig, random_params: Any) -> None:
    params = random_params(small_config, 1)
    heads = MedusaConfig(32, 258, num_heads=2, num_layers=2)
    rng = np.random.default_rng(0)
    trained = jax.tree.map(lambda leaf: 0.1 * rng.standard_normal(leaf.shape).astype(np.float32), init_medusa(heads))
    sums = jax.jit(MedusaLoss(small_config, heads, 0.5).__call__)(trained, params, {"ids": IDS, "segments": SEGMENTS})
    normed, head = features_and_logits(small_config, params)
    expected, hits = 0.0, [0, 0]
    for k in (0, 1):
        x = normed
        for block in (trained[f"heads_{k}"]["blocks_0"], trained[f"heads_{k}"]["blocks_1"]):
            inside = x @ block["kernel"].T + block["bias"]
            x = x + inside / (1 + np.exp(-inside))
        said = log_softmax(head(x))
        for row, length in ((0, 5), (1, 6)):  # the first text of each row
            for place in range(length - 2 - k):
                expected -= 0.5 ** (k + 1) * said[row, place, IDS[row, place + 2 + k]]
                hits[k] += said[row, place].argmax() == IDS[row, place + 2 + k]
        if k == 0:  # the second has three tokens
            expected -= 0.5 * said[0, 5, IDS[0, 7]]
            hits[0] += said[0, 5].argmax() == IDS[0, 7]
    np.testing.assert_allclose(sums["loss"], expected, rtol=1e-4)
    assert float(sums["weight"]) == 4 + 2 + 5
    assert [float(sums["top1_0"]), float(sums["top1_1"])] == hits


def rotated(x: np.ndarray, position: int, theta: float) -> np.ndarray:
    """RoPE on channels (j, j + H / 2) of [heads, H]."""
    half = x.shape[-1] // 2
    angles = position * theta ** (-np.arange(half) / half)
    first, second = x[:, :half], x[:, half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def eagle_by_hand(tensors: dict[str, np.ndarray], embedded: np.ndarray, features: np.ndarray, eps: float) -> np.ndarray:
    """The public layout's network over one text, a token at a time: two query heads of 8 channels on one KV head."""
    named = lambda name: tensors[f"layers.0.{name}.weight"].astype(np.float64)  # noqa: E731
    x = np.concatenate([embedded, features], -1) @ tensors["fc.weight"].T.astype(np.float64) + tensors["fc.bias"]
    keys, values, out = [], [], []
    for position, row in enumerate(x):
        q = rotated((named("self_attn.q_proj") @ row).reshape(2, 8), position, 10000.0)
        keys.append(rotated((named("self_attn.k_proj") @ row).reshape(1, 8), position, 10000.0)[0])
        values.append(named("self_attn.v_proj") @ row)
        logits = q @ np.stack(keys).T / 8**0.5
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        mixed = (weights / weights.sum(-1, keepdims=True)) @ np.stack(values)
        row = row + named("self_attn.o_proj") @ mixed.reshape(-1)
        inside = row / np.sqrt((row**2).mean() + eps) * named("post_attention_layernorm")
        gate = named("mlp.gate_proj") @ inside
        out.append(row + named("mlp.down_proj") @ (gate / (1 + np.exp(-gate)) * (named("mlp.up_proj") @ inside)))
    return np.stack(out)


def test_eagle_file_and_loss_by_hand(
    small_config: ModelConfig, random_params: Any, write_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A file is written, read back, and computed with from its tensors' names alone."""
    from jaxinfer.training.teacher import Teacher

    params = random_params(small_config, 1)
    model = Teacher(write_checkpoint(small_config, params), "float32")
    rng = np.random.default_rng(0)
    fresh = Eagle().start(model, params, 0, [])
    trained = jax.tree.map(lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32), fresh)
    folder = tmp_path / "eagle"
    folder.mkdir()
    Eagle().write(folder, model, params, trained, "float32")
    tensors = load_file(folder / "model.safetensors")
    assert sorted(tensors) == sorted(
        ["embed_tokens.weight", "fc.bias", "fc.weight", "layers.0.post_attention_layernorm.weight"]
        + [f"layers.0.self_attn.{name}_proj.weight" for name in "qkvo"]
        + [f"layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
    )
    said = json.loads((folder / "config.json").read_text())
    assert (said["num_hidden_layers"], said["bias"], said["architectures"]) == (1, True, ["LlamaForCausalLM"])
    config, read, table = read_eagle(folder)
    assert config == eagle_config(small_config) and np.array_equal(table, params["embed"]["embedding"])
    for path, leaf in flat(trained).items():
        assert np.array_equal(flat(read)[path], leaf), path

    loss = jax.jit(EagleLoss(small_config, config, noise=0.0).__call__)
    sums = loss(read, params, {"ids": IDS, "segments": SEGMENTS})
    normed, head = features_and_logits(small_config, params)
    expected = {"regression": 0.0, "classification": 0.0, "top1": 0.0}
    for row, first, end in ((0, 0, 5), (0, 5, 8), (1, 0, 6)):
        embedded = params["embed"]["embedding"][IDS[row, first:end]].astype(np.float64)
        given = np.concatenate([np.zeros((1, 32)), normed[row, first : end - 1]])  # the first token comes with zeros
        guess = eagle_by_hand(tensors, embedded, given, small_config.rms_norm_eps)[1:]
        true = normed[row, first + 1 : end]
        size = np.abs(guess - true)
        expected["regression"] += np.where(size < 1, size**2 / 2, size - 0.5).mean(-1).sum()
        says, target = log_softmax(head(guess)), log_softmax(head(true))
        expected["classification"] -= (np.exp(target) * says).sum()
        expected["top1"] += (says.argmax(-1) == target.argmax(-1)).sum()
    for name, value in expected.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-3, err_msg=name)
    np.testing.assert_allclose(sums["loss"], sums["regression"] + 0.1 * sums["classification"], rtol=1e-5)
    assert float(sums["weight"]) == 4 + 2 + 5


def test_unrolled_eagle_loss_by_hand(
    small_config: ModelConfig, random_params: Any, write_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Every draft on its own: true features up to where it begins, and then its own guesses."""
    from jaxinfer.training.teacher import Teacher

    params = random_params(small_config, 1)
    model = Teacher(write_checkpoint(small_config, params), "float32")
    rng = np.random.default_rng(0)
    kind = Eagle(noise=0.0, unroll=3)
    trained = jax.tree.map(
        lambda leaf: leaf + 0.1 * rng.standard_normal(leaf.shape).astype(np.float32), kind.start(model, params, 0, [])
    )
    folder = tmp_path / "eagle"
    folder.mkdir()
    kind.write(folder, model, params, trained, "float32")
    tensors = load_file(folder / "model.safetensors")
    counted = np.ones_like(IDS, bool)
    counted[0, :3] = False
    batch = {"ids": IDS, "segments": SEGMENTS, "counted": counted}
    sums = jax.jit(kind.loss(model, params).__call__)(trained, params, batch)
    normed, head = features_and_logits(small_config, params)
    table = params["embed"]["embedding"].astype(np.float64)
    regression, hits, length, weight = 0.0, [0, 0, 0], 0.0, 0
    for row, first, end in ((0, 0, 5), (0, 5, 8), (1, 0, 6)):
        for place in range(first, end - 1):
            if not counted[row, place + 1]:
                continue
            weight, held = weight + 1, True
            length += 1
            features = [np.zeros(32), *normed[row, first : place + 1]]
            for step in range(min(3, end - 1 - place)):
                embedded = table[IDS[row, first : place + step + 2]]
                guess = eagle_by_hand(tensors, embedded, np.stack(features), small_config.rms_norm_eps)[-1]
                true = normed[row, place + step + 1]
                size = np.abs(guess - true)
                regression += 0.8**step * np.where(size < 1, size**2 / 2, size - 0.5).mean()
                hit = head(guess).argmax() == head(true).argmax()
                hits[step] += hit
                held &= hit
                length += held
                features.append(guess)
    np.testing.assert_allclose(sums["regression"], regression, rtol=1e-4)
    assert [float(sums[f"top1_{step}"]) for step in range(3)] == hits and float(sums["top1"]) == hits[0]
    assert (float(sums["weight"]), float(sums["length"])) == (weight, length)


def test_an_eagle_head_that_starts_from_a_linear_map_and_the_last_layer(
    small_config: ModelConfig, random_params: Any, write_checkpoint: Callable[..., Path]
) -> None:
    """numpy's least squares over a text's counted tokens; the layer adds nothing to it."""
    from jaxinfer.training.teacher import Teacher

    params = random_params(small_config, 1)
    model = Teacher(write_checkpoint(small_config, params), "float32")
    rng = np.random.default_rng(0)
    ids, segments = rng.integers(0, 258, (8, 32)), np.zeros((8, 32), np.int32)
    counted = rng.random((8, 32)) < 0.9
    batches = [
        {"ids": ids[part], "segments": segments[part], "counted": counted[part]} for part in (slice(4), slice(4, 8))
    ]
    started = Eagle(from_model=True, noise=0.0).start(model, params, 0, batches)
    features = np.asarray(jax.jit(partial(model_features, small_config))(params, ids, segments), np.float64)
    table = params["embed"]["embedding"].astype(np.float64)
    x = np.concatenate([table[ids[:, 1:]], features[:, :-1], np.ones((8, 31, 1))], -1)
    chosen = counted[:, 1:]
    solved = np.linalg.lstsq(x[chosen], features[:, 1:][chosen])[0]
    expected = ((x @ solved - features[:, 1:]) ** 2)[chosen].mean()
    fc = started["fc"]
    found = ((x[..., :-1] @ np.asarray(fc["kernel"]).T + fc["bias"] - features[:, 1:]) ** 2)[chosen].mean()
    assert expected <= found < 1.02 * expected < 0.9 * ((features[:, 1:])[chosen].var())
    loss = jax.jit(Eagle(noise=0.0).loss(model, params).__call__)
    sums = loss(started, params, {"ids": ids, "segments": segments, "counted": counted})
    size = np.abs(x[..., :-1] @ np.asarray(fc["kernel"]).T + fc["bias"] - features[:, 1:])[chosen]
    by_hand = np.where(size < 1, size**2 / 2, size - 0.5).mean(-1).sum()
    np.testing.assert_allclose(sums["regression"], by_hand, rtol=1e-3)
    # what its attention and MLP see of a feature is what the last layer would see of a hidden state
    layer, own, state = params["layers_2"], started["layers_0"], rng.standard_normal(32)
    unit = state / np.sqrt((state**2).mean())
    feature = unit * params["final_norm"]["scale"]
    wanted = np.einsum("kghd,d->kgh", layer["attn"]["qkv"]["kernel"], unit * layer["attn_norm"]["scale"])
    np.testing.assert_allclose(np.asarray(own["attn"]["qkv"]["kernel"]) @ feature, wanted, rtol=1e-4, atol=1e-5)
    seen = feature / np.sqrt((feature**2).mean()) * own["mlp_norm"]["scale"]
    wanted = unit * layer["mlp_norm"]["scale"]
    assert np.corrcoef(seen, wanted)[0, 1] > 0.9999 and 0.8 < np.linalg.norm(seen) / np.linalg.norm(wanted) < 1.25
    assert np.array_equal(own["mlp"]["gate_up"]["kernel"], layer["mlp"]["gate_up"]["kernel"])


def test_kept_features_and_a_cut_vocabulary(small_config: ModelConfig, random_params: Any) -> None:
    """Features that a batch brings give the same numbers; so does a cut that has all the tokens. A smaller one does not
    learn the tokens that it lacks, and counts them as wrong."""
    params = random_params(small_config, 1)
    batch = {"ids": IDS, "segments": SEGMENTS}
    features = jax.jit(partial(model_features, small_config))(params, IDS, SEGMENTS)
    rng = np.random.default_rng(0)
    fresh = init_medusa(heads := MedusaConfig(32, 258, 2))
    trained = jax.tree.map(lambda leaf: 0.1 * rng.standard_normal(leaf.shape).astype(np.float32), fresh)
    loss = jax.jit(MedusaLoss(small_config, heads).__call__)
    plain = loss(trained, params, batch)
    kept = {name: params[name] for name in ("embed", "lm_head", "final_norm")}
    for frozen in (kept, {**kept, **cut_output(small_config, params, np.arange(258))}):
        for name, value in loss(trained, frozen, {**batch, "features": features}).items():
            np.testing.assert_allclose(value, plain[name], rtol=1e-4, err_msg=name)
    few = loss(
        trained, {**kept, **cut_output(small_config, params, np.array([100, 200]))}, {**batch, "features": features}
    )
    assert float(few["loss"]) == 0 and float(few["top1_0"]) == 0 and float(few["length"]) == float(few["weight"])


@pytest.mark.parametrize(
    ("kind", "options", "left"),
    [
        (Medusa(2), {}, 0.7),
        (Eagle(), {}, 0.7),
        # starts where a linear map can get, so that less is left to learn
        (Eagle(unroll=2, from_model=True), {"cache_features": True, "loss_vocab": 40}, 0.95),
    ],
    ids=["medusa", "eagle", "eagle_cached"],
)
def test_heads_learn_and_are_written(
    kind: Medusa | Eagle,
    options: dict[str, Any],
    left: float,
    teacher: Path,
    data: DataOptions,
    training: Callable[..., Any],
    tmp_path: Path,
) -> None:
    pace = training(48, log_every=8, save_every=48, eval_every=48)
    made = train_heads(teacher, tmp_path / "heads", kind, data, pace, **options)
    assert 1 <= made.before["length"] < made.after["length"]
    assert made.after["loss"] < left * made.before["loss"]
    assert sorted(path.name for path in (tmp_path / "heads").iterdir() if path.is_dir()) == []
    if isinstance(kind, Medusa):
        config, params = read_medusa(tmp_path / "heads")
        assert config == MedusaConfig(32, 258, 2)
    else:
        _, params, _ = read_eagle(tmp_path / "heads")
    assert sum(leaf.size for leaf in flat(params).values()) == made.num_params


def test_medusa_files_with_and_without_output_matrices(tmp_path: Path) -> None:
    """Written by hand in the layout of FasterDecoding/Medusa, read, and written again."""
    from safetensors.numpy import save_file

    from jaxinfer.checkpoint.medusa_heads import write_medusa

    rng = np.random.default_rng(0)
    tensors = {}
    for head in (0, 1):
        tensors[f"{head}.0.linear.weight"] = rng.standard_normal((4, 4)).astype(np.float32)
        tensors[f"{head}.0.linear.bias"] = rng.standard_normal(4).astype(np.float32)
        tensors[f"{head}.1.weight"] = rng.standard_normal((9, 4)).astype(np.float32)
    folder = tmp_path / "heads"
    folder.mkdir()
    said = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "me"}
    (folder / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match="has no medusa_lm_head.safetensors"):
        read_medusa(folder)
    (folder / "medusa_lm_head.pt").write_bytes(b"\x80\x02")
    with pytest.raises(ValueError, match="medusa_lm_head.pt"):
        read_medusa(folder)
    save_file({f"medusa_heads.{name}": value for name, value in tensors.items()}, folder / "medusa_lm_head.safetensors")
    config, params = read_medusa(folder)
    assert config == MedusaConfig(4, 9, 2, 1, own_heads=True)
    assert np.array_equal(params["heads_1"]["blocks_0"]["kernel"], tensors["1.0.linear.weight"])
    assert np.array_equal(params["heads_0"]["lm_head"]["kernel"], tensors["0.1.weight"])
    again = tmp_path / "again"
    again.mkdir()
    write_medusa(again, config, params, "me", "float32")
    written = load_file(again / "medusa_lm_head.safetensors")
    assert written.keys() == tensors.keys()
    assert all(np.array_equal(written[name], value) for name, value in tensors.items())

    shared = {name: value for name, value in tensors.items() if "linear" in name}
    save_file(shared, folder / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match="says no vocab_size"):
        read_medusa(folder)
    assert read_medusa(folder, 9)[0] == MedusaConfig(4, 9, 2, 1)
    del shared["1.0.linear.bias"]
    save_file(shared, folder / "medusa_lm_head.safetensors")
    with pytest.raises(ValueError, match="tensor '1.0.linear.bias' is missing"):
        read_medusa(folder, 9)


def test_fresh_medusa_heads_say_what_the_model_says(small_config: ModelConfig, random_params: Any) -> None:
    params = random_params(small_config, 1)
    features = jax.jit(partial(model_features, small_config))(params, IDS, SEGMENTS)
    heads = MedusaConfig(32, 258, 1, own_heads=True)
    fresh = init_medusa(heads, params["lm_head"]["kernel"])
    (logits,) = jax.jit(MedusaHeads(heads).apply)({"params": fresh}, features[0])
    expected = jax.jit(SequenceDecoder(small_config).__call__)(params, IDS, SEGMENTS)[0]
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_models_that_have_no_eagle_head(small_config: ModelConfig) -> None:
    for other in (replace(small_config, post_norms=True), replace(small_config, block="parallel")):
        with pytest.raises(ValueError, match="train Medusa heads or a draft model"):
            eagle_config(other)
