"""Training of EAGLE-3 heads: the loss by hand, a run in which it falls and that goes on to the same bits, the files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.checkpoint.eagle3_head import read_eagle3
from jaxinfer.checkpoint.leaf_shapes import flat
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle3 import Eagle3Head, eagle3_config, init_eagle3
from jaxinfer.models.sequence import SequenceAttention, SequenceDecoder
from jaxinfer.training import training_run
from jaxinfer.training.corpus import DataOptions
from jaxinfer.training.eagle3_loss import Eagle3Loss, tapped_features
from jaxinfer.training.features import cut_output, model_features
from jaxinfer.training.head_kinds import Eagle3
from jaxinfer.training.heads import train_heads
from jaxinfer.training.packing import PADDING
from jaxinfer.training.teacher import Teacher

pytestmark = pytest.mark.filterwarnings("ignore:loss.png was not drawn")
IDS = np.array([[5, 1, 7, 2, 9, 4, 3, 8], [3, 3, 8, 1, 0, 6, 0, 0]], np.int32)
SEGMENTS = np.array([[0, 0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, PADDING, PADDING]], np.int32)
TOKENS = np.array([0, 1, 2, 3, 6, 8, 9, 100])  # 4, 5 and 7 cannot be guessed


def log_softmax(logits: Any) -> np.ndarray:
    wide = np.asarray(logits, np.float64)
    wide = wide - wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def test_hidden_states_at_the_taps(small_config: ModelConfig, random_params: Any) -> None:
    params = random_params(small_config, 1)
    found = np.asarray(tapped_features(small_config, (0, 1, 3), params, IDS, SEGMENTS))
    decoder = SequenceDecoder(small_config)
    embedded = params["embed"]["embedding"][IDS]
    np.testing.assert_allclose(found[..., :32], embedded, atol=1e-6)
    np.testing.assert_allclose(found[..., 32:64], decoder.layer(0, params["layers_0"], embedded, SEGMENTS), atol=1e-5)
    np.testing.assert_allclose(found[..., 64:96], decoder.hidden(params, IDS, SEGMENTS), atol=1e-5)
    np.testing.assert_allclose(found[..., 96:], model_features(small_config, params, IDS, SEGMENTS), atol=1e-5)


def test_the_loss_by_hand(small_config: ModelConfig, random_params: Any) -> None:
    """Every draft on its own, by the published module: true states up to where it begins, then its own outputs."""
    params = random_params(small_config, 1)
    config = eagle3_config(small_config, len(TOKENS))
    rng = np.random.default_rng(0)
    head = Eagle3Head(config)
    shapes = flat(jax.eval_shape(lambda: init_eagle3(config, jax.random.key(0))))
    trained: dict[str, Any] = {}
    for path, spec in shapes.items():
        node = trained
        *names, last = path.split("/")
        for name in names:
            node = node.setdefault(name, {})
        node[last] = (0.3 * rng.standard_normal(spec.shape) + (last == "scale")).astype(np.float32)
    frozen = {**params, **cut_output(small_config, params, TOKENS)}
    sums = jax.jit(Eagle3Loss(small_config, config, unroll=2).__call__)(
        trained, frozen, {"ids": IDS, "segments": SEGMENTS}
    )
    states = np.asarray(tapped_features(small_config, config.taps, params, IDS, SEGMENTS))
    table, matrix = params["embed"]["embedding"], params["lm_head"]["kernel"][TOKENS].astype(np.float64)
    run = lambda x, embedded: head.apply(  # noqa: E731
        {"params": trained}, x, embedded, np.arange(len(x), dtype=np.int32), SequenceAttention(None, 1), [None]
    )[0]
    loss, hits, length, weight = 0.0, [0, 0], 0.0, 0
    for row, first, end in ((0, 0, 5), (0, 5, 8), (1, 0, 6)):
        taps = np.split(states[row, first:end, :96], 3, axis=-1)
        fused = np.asarray(head.apply({"params": trained}, taps, method=Eagle3Head.fuse))
        for place in range(end - first - 1):
            weight, length, held = weight + 1, length + 1, True
            x = np.concatenate([0 * fused[:1], fused[: place + 1]])  # the first token comes with zeros
            for step in range(min(2, end - first - 2 - place)):
                ids = IDS[row, first : first + place + step + 2]
                guess = np.asarray(run(x, table[ids]))[-1:]
                said = log_softmax(head.apply({"params": trained}, guess, method=Eagle3Head.logits))[0]
                wanted = log_softmax(states[row, first + place + step + 1, 96:] @ matrix.T)
                token = IDS[row, first + place + step + 2]
                if token in TOKENS:
                    loss -= 0.8**step * (np.exp(wanted) * said).sum()
                hit = TOKENS[said.argmax()] == token
                hits[step] += hit
                held &= hit
                length += held
                x = np.concatenate([x, guess])
    np.testing.assert_allclose(sums["loss"], loss, rtol=1e-4)
    assert [float(sums["top1_0"]), float(sums["top1_1"])] == hits
    assert (float(sums["weight"]), float(sums["length"])) == (weight, length)


def test_a_head_that_starts_as_a_layer(small_config: ModelConfig, random_params: Any, write_checkpoint: Any) -> None:
    """With nothing of the token, it says what the model would say if it ended after that layer."""
    params = random_params(small_config, 1)
    model = Teacher(write_checkpoint(small_config, params), "float32")
    frozen = {**params, **cut_output(small_config, params, TOKENS)}
    started = Eagle3(from_model=True).start(model, frozen, 0, [])
    config = eagle3_config(small_config, len(TOKENS))
    head, taps = Eagle3Head(config), config.taps
    assert taps[-1] == 3  # what comes out of the last layer: that layer once more
    kernel = started["layers_0"]["attn"]["qkv"]["kernel"]
    started["layers_0"]["attn"]["qkv"]["kernel"] = kernel.at[..., :32].set(0)
    states = np.asarray(tapped_features(small_config, taps, params, IDS[:1, :5], SEGMENTS[:1, :5]))
    x = head.apply({"params": started}, np.split(states[0, :, :96], 3, axis=-1), method=Eagle3Head.fuse)
    attend = SequenceAttention(None, 1)
    guess, _ = head.apply({"params": started}, x, 0 * x, np.arange(5, dtype=np.int32), attend, [None])
    found = head.apply({"params": started}, guess, method=Eagle3Head.logits)
    decoder = SequenceDecoder(small_config)
    out = decoder.layer(2, params["layers_2"], states[:, :, 64:96])
    np.testing.assert_allclose(found, decoder.head(params, out)[0][:, TOKENS], rtol=1e-3, atol=1e-3)


class Killed(BaseException):
    """What a signal does to a process, as far as files are concerned."""


def test_it_learns_goes_on_where_it_was_killed_and_is_written(
    teacher: Path, data: DataOptions, training: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pace = training(24, save_every=12, eval_every=24)
    run = lambda name, **more: train_heads(  # noqa: E731
        teacher,
        tmp_path / name,
        Eagle3(unroll=2, from_model=True),
        data,
        pace,
        loss_vocab=20,
        cache_features=True,
        **more,
    )
    made = run("whole")
    assert made.after["loss"] < 0.7 * made.before["loss"] and made.after["length"] > made.before["length"]
    save, calls = training_run.save_state, []

    def until_killed(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise Killed
        save(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(training_run, "save_state", until_killed)
        with pytest.raises(Killed):
            run("broken")
    run("broken", resume=True)
    whole, broken = (read_eagle3(tmp_path / name, 3) for name in ("whole", "broken"))
    assert whole.config.draft_vocab_size == 20 and whole.config.taps == (0, 1, 3)
    text = set(b"the cat sat on the mat and the dog sat on the log. ")
    assert text <= set(whole.token_ids.tolist())
    for path, leaf in flat(whole.params).items():
        assert np.array_equal(leaf, flat(broken.params)[path]), path
