"""The student: its architecture, and what it starts from."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoint.leaf_shapes import flat, nested
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import init_params, param_shapes
from jaxinfer.typing import Params

LAYER_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
"""What the number of layers is called in the config.json of one family or another."""
LAYER_LISTS = ("layer_types", "no_rope_layers")
"""Settings of a config.json that have an entry for each layer."""


def copied_layers(teacher: int, student: int | Sequence[int]) -> list[int]:
    """Which of the teacher's layers a student is made of.

    Args:
        teacher: how many it has.
        student: how many: evenly spaced, the first and the last among them, every second one for half of them. Or
            which, ascending, from 0.

    Raises:
        ValueError: the student has no layer, more than the teacher, or one that the teacher has not.
    """
    if not isinstance(student, int):
        layers = list(student)
        if not layers or sorted(set(layers)) != layers or layers[0] < 0 or layers[-1] >= teacher:
            raise ValueError(f"student_layers={layers} must be ascending numbers of layers, 0 to {teacher - 1}")
        return layers
    if not 1 <= student <= teacher:
        raise ValueError(f"student_layers={student} must be 1 to the teacher's {teacher}")
    if student == 1:
        return [teacher - 1]
    return [place * (teacher - 1) // (student - 1) for place in range(student)]


def cut_config(config: ModelConfig, layers: list[int]) -> ModelConfig:
    """The architecture with those layers only; what is said layer by layer is kept for each, and said once where all
    that are left are alike, as families' configs have it."""
    flags: dict[str, Any] = {
        field.name: tuple(getattr(config, field.name)[layer] for layer in layers)
        for field in fields(config)
        if field.name.endswith("_layers") and isinstance(getattr(config, field.name), tuple)
    }
    if not any(flags.get("window_layers", [True])):
        flags |= {"window_layers": None, "sliding_window": None}
    flags = {name: None if value and all(value) else value for name, value in flags.items()}
    return replace(config, num_hidden_layers=len(layers), **flags)


def cut_hf_config(hf_config: Mapping[str, Any] | None, layers: list[int]) -> dict[str, Any] | None:
    """The same for a config.json; it is checked against `cut_config` when it is written."""
    if hf_config is None:
        return None
    before = {hf_config[key] for key in LAYER_COUNTS if key in hf_config}
    cut = dict(hf_config)
    for key in LAYER_COUNTS:
        if key in cut:
            cut[key] = len(layers)
    for key in LAYER_LISTS:
        if isinstance(cut.get(key), list) and {len(cut[key])} == before:
            cut[key] = [cut[key][layer] for layer in layers]
    return cut


def initial_params(config: ModelConfig, teacher: Params, layers: list[int], seed: int) -> Params:
    """Float32 parameters of a student: the teacher's where they fit, and fresh ones elsewhere.

    Args:
        config: of the student.
        teacher: its parameters, float arrays.
        layers: for each of the student's layers, that of the teacher which is copied.
        seed: of the fresh ones.
    """
    source = flat(teacher)
    shapes = flat(param_shapes(config))
    copied = {}
    for path, spec in shapes.items():
        found = source.get(_teacher_path(path, layers))
        if found is not None and found.shape == spec.shape:
            copied[path] = np.asarray(found, np.float32)
    if len(copied) < len(shapes):
        copied = flat(jax.jit(lambda key: init_params(config, key))(jax.random.key(seed))) | copied
    return nested({path: copied[path] for path in shapes})


def _teacher_path(path: str, layers: list[int]) -> str:
    first, *rest = path.split("/")
    if not first.startswith("layers_"):
        return path
    return "/".join([f"layers_{layers[int(first.removeprefix('layers_'))]}", *rest])
