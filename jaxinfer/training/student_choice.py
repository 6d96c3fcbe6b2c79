"""Which student: a checkpoint, a described architecture, or the teacher with fewer layers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.hf_export import exported_config
from jaxinfer.checkpoint.load import load_params
from jaxinfer.checkpoint.model_json import config_from_json
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.registry import family_of_hf_config
from jaxinfer.tokenizers.tokenizer import Tokenizer
from jaxinfer.training.student import copied_layers, cut_config, cut_hf_config, initial_params
from jaxinfer.typing import Params


@dataclass(frozen=True)
class Student:
    """A student that has been checked against its teacher; no weight has been read.

    Attributes:
        checkpoint: its description. `has_weights` tells whether it starts from weights of its own.
        layers: the teacher's layer that each of its layers is copied from, where it has no weights of its own.
    """

    checkpoint: Checkpoint
    layers: list[int]

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.model_config

    def params(self, teacher: Params | None, seed: int) -> Params:
        """Float32 parameters to start from. `teacher`: its parameters; None where `checkpoint.has_weights`."""
        if self.checkpoint.has_weights:
            return load_params(self.checkpoint, "float32")
        assert teacher is not None
        return initial_params(self.config, teacher, self.layers, seed)


def choose_student(teacher: Checkpoint, student: Path | None, student_layers: int | Sequence[int] | None) -> Student:
    """Opens what is named, and checks that it can learn from this teacher and be written as a checkpoint.

    Args:
        teacher: an opened checkpoint.
        student: a model directory or GGUF file, which is trained further; or a .json file with the fields of a
            `ModelConfig` or a config.json of Hugging Face's, whose parameters are the teacher's where they fit, layers
            as `copied_layers` says, and fresh elsewhere.
        student_layers: the teacher's architecture with so many of its layers, or with these, see `copied_layers`. One
            of the two must be given.

    Raises:
        ValueError: neither or both are given, the student does not load or has another vocabulary, or no config.json
            can say what it is.
    """
    if (student is None) == (student_layers is None):
        raise ValueError("give either student, a checkpoint or a config, or student_layers, a number of layers")
    if student_layers is not None:
        layers = copied_layers(teacher.model_config.num_hidden_layers, student_layers)
        config = cut_config(teacher.model_config, layers)
        chosen = Student(_described(teacher, config, cut_hf_config(teacher.hf_config, layers)), layers)
    elif student is not None and student.suffix == ".json" and student.is_file():
        chosen = _from_json(teacher, student)
    else:
        assert student is not None
        chosen = Student(open_checkpoint(student), [])
        if chosen.checkpoint.layout is not None:
            raise ValueError(f"student {student} is quantised; give the model in floats, which can be trained")
    _check_vocabulary(teacher, chosen.checkpoint)
    exported_config(chosen.checkpoint)
    return chosen


def _described(teacher: Checkpoint, config: ModelConfig, hf_config: dict[str, Any] | None) -> Checkpoint:
    """A checkpoint without weights, with the teacher's ends and sampling defaults."""
    return replace(
        teacher, model_config=config, hf_config=hf_config, placements=(), leaves=None, tied_head=None, layout=None
    )


def _from_json(teacher: Checkpoint, file: Path) -> Student:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(said, dict) and ("architectures" in said or "model_type" in said):
            family = family_of_hf_config(said)
            config = family.model_config(said)
            described = replace(_described(teacher, config, said), family=family, metadata=None)
        else:
            config = config_from_json(said)
            described = replace(_described(teacher, config, None), family=None)
    except (ValueError, TypeError) as error:
        raise ValueError(f"student {file}: {error}") from error
    own, theirs = config.num_hidden_layers, teacher.model_config.num_hidden_layers
    return Student(described, copied_layers(theirs, own) if own <= theirs else list(range(own)))


def _check_vocabulary(teacher: Checkpoint, student: Checkpoint) -> None:
    mine, theirs = student.model_config.vocab_size, teacher.model_config.vocab_size
    if mine != theirs:
        raise ValueError(
            f"the student has a vocabulary of {mine} tokens and the teacher one of {theirs}; distributions over "
            "different tokens cannot be compared: give a student with the teacher's tokenizer"
        )
    if not student.has_weights:
        return
    differing = first_difference(teacher.tokenizer(), student.tokenizer())
    if differing is not None:
        raise ValueError(
            f"token {differing} is another one in the student's tokenizer than in the teacher's; give a student with "
            "the teacher's tokenizer"
        )


def first_difference(one: Tokenizer, other: Tokenizer) -> int | None:
    """The first id that stands for another text in the other tokenizer, or is of only one; None if there is none."""
    for token in range(max(one.vocab_size, other.vocab_size)):
        if token >= min(one.vocab_size, other.vocab_size) or one.token_text(token) != other.token_text(token):
            return token
    return None
