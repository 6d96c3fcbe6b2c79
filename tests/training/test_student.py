"""What a student is made of."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.models.config import ModelConfig
from jaxinfer.training.student import copied_layers, cut_config, cut_hf_config, initial_params
from jaxinfer.training.student_choice import choose_student


def test_layers_are_spread_evenly_with_both_ends() -> None:
    assert copied_layers(30, 15) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 29]
    assert copied_layers(6, [0, 4]) == [0, 4]
    assert copied_layers(12, 12) == list(range(12))
    assert (copied_layers(6, 2), copied_layers(6, 1)) == ([0, 5], [5])


def test_what_is_said_for_each_layer_is_cut_too(tiny_config: ModelConfig) -> None:
    flags = (True, False, True, False)
    config = replace(tiny_config, num_hidden_layers=4, sliding_window=8, window_layers=flags)
    assert cut_config(config, [0, 3]) == replace(config, num_hidden_layers=2, window_layers=(True, False))
    assert cut_config(config, [0, 2]) == replace(config, num_hidden_layers=2, window_layers=None)
    bare = replace(config, num_hidden_layers=2, window_layers=None, sliding_window=None)
    assert cut_config(config, [1, 3]) == bare
    said = {"num_hidden_layers": 4, "layer_types": ["a", "b", "c", "d"], "eos_token_id": [1, 2, 3, 4]}
    cut = {"num_hidden_layers": 2, "layer_types": ["a", "d"], "eos_token_id": [1, 2, 3, 4]}
    assert cut_hf_config(said, [0, 3]) == cut
    assert cut_hf_config({"n_layer": 12}, [0]) == {"n_layer": 1}


def test_what_fits_is_copied_and_the_rest_is_fresh(tiny_config: ModelConfig, tiny_params: Any) -> None:
    theirs = tiny_params(0)
    narrow = replace(tiny_config, num_hidden_layers=1, intermediate_size=96)
    mine = initial_params(narrow, theirs, [1], seed=0)
    assert np.array_equal(mine["embed"]["embedding"], theirs["embed"]["embedding"])
    assert np.array_equal(mine["layers_0"]["attn"]["qkv"]["kernel"], theirs["layers_1"]["attn"]["qkv"]["kernel"])
    fresh = np.asarray(mine["layers_0"]["mlp"]["down"]["kernel"])
    assert fresh.shape == (64, 96) and fresh.std() > 0


def test_a_student_from_a_config_json(
    write_checkpoint: Callable[..., Path], tiny_config: ModelConfig, tiny_params: Any, tmp_path: Path
) -> None:
    teacher = open_checkpoint(write_checkpoint(tiny_config, tiny_params(0), eos_token_id=7))
    said = json.loads((teacher.path / "config.json").read_text())
    described = tmp_path / "config.json"
    described.write_text(json.dumps({**said, "num_hidden_layers": 5}))
    found = choose_student(teacher, described, None)
    assert found.config == replace(tiny_config, num_hidden_layers=5) and found.layers == [0, 1, 2, 3, 4]
    described.write_text(json.dumps({"vocab_size": 256, "layers": 3}))
    with pytest.raises(ValueError, match="config.json: ModelConfig has no field 'layers'"):
        choose_student(teacher, described, None)


def test_a_student_with_other_tokens_is_refused(
    write_checkpoint: Callable[..., Path], small_config: ModelConfig, random_params: Any
) -> None:
    params = random_params(small_config)
    teacher, student = (write_checkpoint(small_config, params, name=name) for name in ("one", "two"))
    text = (student / "tokenizer.json").read_text()
    assert choose_student(open_checkpoint(teacher), student, None).checkpoint.has_weights
    (student / "tokenizer.json").write_text(text.replace('"A":65', '"A":66').replace('"B":66', '"B":65'))
    with pytest.raises(ValueError, match="token 65 is another one in the student's tokenizer"):
        choose_student(open_checkpoint(teacher), student, None)
