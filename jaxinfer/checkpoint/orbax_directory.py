"""Orbax model directories: what lies beside the parameters, read without Orbax or JAX.

jaxinfer.json              the ModelConfig, dtype, end ids, and shape and dtype of every parameter
params/                    the parameter tree, as Orbax's PyTree handlers write and read it
generation_config.json, tokenizer.json, ...    as in a Hugging Face directory, where there are any
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.hf_directory import read_json
from jaxinfer.checkpoint.model_json import config_from_json, config_to_json
from jaxinfer.models.config import ModelConfig

DESCRIPTION = "jaxinfer.json"
PARAMS = "params"
FORMAT, VERSION = "orbax", 1
# Files that Orbax puts into the root of what it saves.
OWN_FILES = ("_METADATA", "_CHECKPOINT_METADATA")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class StoredLeaf:
    """Shape and dtype of a parameter as it is stored."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the values; fewer are on disk, where they are compressed."""
        return self.size * np.dtype(getattr(ml_dtypes, self.dtype, self.dtype)).itemsize


@dataclass(frozen=True)
class OrbaxModel:
    """What jaxinfer.json says.

    Args:
        model_config: the architecture.
        dtype: of the parameters.
        leaves: every parameter by its path, e.g. "layers_0/attn/qkv/kernel".
        eos_token_ids: ids that end a generation.
        hf_config: the config.json of the model it was converted from; None where there was none.
    """

    model_config: ModelConfig
    dtype: str
    leaves: Mapping[str, StoredLeaf]
    eos_token_ids: frozenset[int] = frozenset()
    hf_config: Mapping[str, Any] | None = field(default=None, repr=False)

    def as_json(self) -> dict[str, Any]:
        """The content of jaxinfer.json."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "dtype": self.dtype,
            "eos_token_ids": sorted(self.eos_token_ids),
            "model_config": config_to_json(self.model_config),
            "hf_config": None if self.hf_config is None else dict(self.hf_config),
            "leaves": {name: [leaf.dtype, list(leaf.shape)] for name, leaf in self.leaves.items()},
        }


def read_description(directory: Path) -> OrbaxModel:
    """Reads jaxinfer.json and checks that the parameters lie beside it.

    Raises:
        ValueError: malformed, of a newer version, or the parameters are missing; names the file.
    """
    file = directory / DESCRIPTION
    content = read_json(file)
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise ValueError(
            f"{file} has format={content.get('format')!r}, version={content.get('version')!r}; this jaxinfer reads "
            f"{FORMAT!r}, {VERSION}: update it, or save the checkpoint again"
        )
    try:
        model = OrbaxModel(
            model_config=config_from_json(content["model_config"]),
            dtype=str(content["dtype"]),
            leaves={
                name: StoredLeaf(tuple(map(int, shape)), str(dtype))
                for name, (dtype, shape) in content["leaves"].items()
            },
            eos_token_ids=frozenset(map(int, content["eos_token_ids"])),
            hf_config=content.get("hf_config"),
        )
        if model.dtype not in DTYPES:
            raise ValueError(f"dtype={model.dtype!r} must be one of {', '.join(DTYPES)}")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{file} is malformed: {error!r}; save the checkpoint again") from error
    if not (directory / PARAMS / OWN_FILES[0]).is_file():
        raise ValueError(f"{directory / PARAMS} is missing or no Orbax checkpoint, but {DESCRIPTION} needs it")
    return model


def refuse_foreign(path: Path) -> None:
    """Raises ValueError for an Orbax checkpoint that does not say what model it is."""
    if any((path / name).is_file() for name in OWN_FILES) and not (path / "config.json").is_file():
        raise ValueError(
            f"{path} is an Orbax checkpoint without {DESCRIPTION}, so nothing says which model it is. Load it with "
            "jaxinfer.checkpoint.load_orbax(path, ModelConfig(...), name_map=...) and pass LLM(params=..., "
            "model_config=...), or write a model directory of it with jaxinfer.checkpoint.save_checkpoint"
        )
