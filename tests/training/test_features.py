"""A model's hidden states on disk, and its output head for some tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig
from jaxinfer.training.feature_cache import LastFeatures, cached_features
from jaxinfer.training.features import (
    check_loss_vocab,
    cut_output,
    frequent_tokens,
    head_logits,
    model_features,
    model_logits,
    token_places,
)
from jaxinfer.training.packing import PackedRows, pack
from jaxinfer.training.step import data_mesh
from jaxinfer.training.teacher import Teacher

ROWS = pack([[5, 1, 7, 2, 9], [4, 3, 8], [3, 3, 8, 1, 0, 6], [2, 3, 2]], 6)


def test_the_most_frequent_tokens_come_before_those_with_low_ids() -> None:
    rows = pack([[9, 9, 9, 7, 7, 12, 3]], 8)
    assert frequent_tokens(rows, 2, 20).tolist() == [7, 9]
    assert frequent_tokens(rows, 6, 20).tolist() == [0, 1, 3, 7, 9, 12]  # nothing of the padding's zeros
    for wrong in (-1, 21):
        with pytest.raises(ValueError, match=f"loss_vocab={wrong} must be 0, for all, or 1 to the model's 20"):
            check_loss_vocab(wrong, 20)


def test_a_cut_head_gives_the_columns_of_the_whole_one(small_config: ModelConfig, random_params: Any) -> None:
    params, tokens = random_params(small_config, 1), np.array([3, 17, 200, 257])
    cut = cut_output(small_config, params, tokens)
    x = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
    for logits in (model_logits, head_logits):
        whole = np.asarray(logits(small_config, params, x))
        np.testing.assert_allclose(logits(small_config, cut, x), whole[:, tokens], rtol=1e-5, atol=1e-5)
    places, known = token_places(cut, np.array([200, 4, 3]))
    assert (places.tolist(), known.tolist()) == ([2, 0, 0], [True, False, True])


def test_hidden_states_are_kept(
    small_config: ModelConfig, random_params: Any, write_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    params = random_params(small_config, 1)
    model = Teacher(write_checkpoint(small_config, params), "float32")

    def cached(rows: PackedRows) -> Any:
        return cached_features(tmp_path, rows, LastFeatures(), model, params, data_mesh(1), 2, False)

    expected = np.asarray(jax.jit(model_features, static_argnums=0)(small_config, params, ROWS.ids, ROWS.segments))
    found = cached(ROWS).read(np.arange(len(ROWS)))["features"]
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    (folder,) = tmp_path.glob("last_*")
    (file,) = folder.glob("*.safetensors")
    before = file.stat().st_mtime_ns
    cached(ROWS)
    assert file.stat().st_mtime_ns == before, "they are computed once"
    cached(ROWS.rows(np.arange(2)))
    assert len(list(tmp_path.glob("last_*"))) == 2, "other rows have their own"
    huge = {**params, "final_norm": {"scale": params["final_norm"]["scale"] * 1e6}}
    with pytest.raises(ValueError, match="exceed float16"):
        cached_features(tmp_path / "b", ROWS, LastFeatures(), model, huge, data_mesh(1), 2, False)
