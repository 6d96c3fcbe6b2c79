"""Layers that a calibrated quantisation is done with, kept as they are until the whole model is."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxinfer.checkpoint.output_directory import sync_entry
from jaxinfer.quant.array import QuantArray

_ARRAYS = ("codes", "scale", "offset", "codebook", "order")
_SETTINGS = ("bits", "group", "axis", "shape", "dtype", "act_bits")
_TABLE = "table"


class FinishedLayers:
    """A folder with a file for each layer.

    Args:
        folder: where; it is made when the first layer comes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def save(self, index: int, params: Mapping[str, np.ndarray | QuantArray]) -> None:
        """Keeps a layer's parameters; scales must not be codes."""
        self._folder.mkdir(exist_ok=True)
        arrays: dict[str, np.ndarray] = {}
        table: list[dict[str, Any]] = []
        for path, value in params.items():
            parts = {"": value}
            entry: dict[str, Any] = {"path": path, "parts": {}}
            if isinstance(value, QuantArray):
                entry["settings"] = {name: getattr(value, name) for name in _SETTINGS}
                parts = {name: getattr(value, name) for name in _ARRAYS if getattr(value, name) is not None}
            for name, part in parts.items():
                array = np.ascontiguousarray(part)
                key = str(len(arrays))
                arrays[key] = array.reshape(-1).view(np.uint8)
                entry["parts"][name] = [key, array.dtype.name, list(array.shape)]
            table.append(entry)
        text = np.frombuffer(json.dumps(table).encode(), np.uint8)
        with self._path(index).open("wb") as file:
            np.savez(file, allow_pickle=False, **{_TABLE: text}, **arrays)
        sync_entry(self._path(index))

    def load(self, index: int) -> dict[str, np.ndarray | QuantArray]:
        """A layer's parameters, bit for bit."""
        params: dict[str, np.ndarray | QuantArray] = {}
        with np.load(self._path(index), allow_pickle=False) as file:
            for entry in json.loads(file[_TABLE].tobytes()):
                parts = {name: _array(file[key], *said) for name, (key, *said) in entry["parts"].items()}
                params[entry["path"]] = parts[""] if "" in parts else _quant_array(parts, entry["settings"])
        return params

    def _path(self, index: int) -> Path:
        return self._folder / f"layer-{index:05}.npz"


def _array(values: np.ndarray, dtype: str, shape: list[int]) -> np.ndarray:
    return values.view(np.dtype(getattr(ml_dtypes, dtype, dtype))).reshape(shape)


def _quant_array(parts: Mapping[str, np.ndarray], settings: Mapping[str, Any]) -> QuantArray:
    given: dict[str, Any] = {name: parts.get(name) for name in _ARRAYS}
    return QuantArray(**given, **{**settings, "shape": tuple(settings["shape"])})
