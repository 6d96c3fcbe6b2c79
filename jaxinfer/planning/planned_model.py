"""What a planner can be asked about: a size in billions, a model's name, or a model. Loads no weights."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.formulas import WeightFormat
from jaxinfer.planning.presets import PRESETS, billions, generic_model, preset_named


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan for.

    Attributes:
        name: what it is called.
        config: its architecture.
        quant: format of the weights, where they are quantised already: that of `WEIGHT_FORMATS` which most have.
        stored: what they really take, all of the layers' matrices on average; None where nothing is quantised.
        method: the checkpoint's, `quantization` of the engine; None where nothing is quantised.
        names: all values of `quantization` that agree with it.
        packing: how it is packed, in words.
    """

    name: str
    config: ModelConfig
    quant: str | None = None
    stored: WeightFormat | None = None
    method: str | None = None
    names: tuple[str, ...] = ()
    packing: str = ""


def planned_model(model: float | str | Path | ModelConfig) -> PlannedModel:
    """Finds out what is meant.

    Args:
        model: billions of parameters (7, "7B"), a name of `PRESETS` or the Hub id of one or of its tuned forms, a
            config.json or the folder of one, a GGUF file, another Hub id (its config is fetched), or the architecture.

    Raises:
        ValueError: there is no such model, or its architecture, or the way it is quantised, is not supported.
        TypeError: none of these.
        ConnectionError: a Hub id whose config is not here, and the network does not answer.
    """
    if isinstance(model, ModelConfig):
        return PlannedModel("model", model)
    if isinstance(model, bool) or not isinstance(model, int | float | str | Path):
        raise TypeError(
            f"model_size={model!r} must be billions of parameters, a model's name or path, or a ModelConfig"
        )
    size = None if isinstance(model, Path) else billions(model)
    if size is not None:
        return PlannedModel(f"{size:g}B", generic_model(size))
    path = Path(str(model))
    if path.exists():
        return _of_path(path)
    named = preset_named(str(model))
    if named is not None:
        return PlannedModel(*named)
    return _of_hub(str(model))


def _of_path(path: Path) -> PlannedModel:
    path = path.resolve()
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json" and file.is_file():
        from jaxinfer.models.families.hf_config import reading

        with reading(file):
            return _of_hf_config(file.parent, json.loads(file.read_text(encoding="utf-8")))
    from jaxinfer.checkpoint.checkpoint import open_checkpoint

    return PlannedModel(path.name, open_checkpoint(path).model_config)


def _of_hub(name: str) -> PlannedModel:
    from jaxinfer.cache_dir import default_cache_dir
    from jaxinfer.checkpoint.resolve import resolve_model

    try:
        path = resolve_model(name, weights=False, cache_dir=default_cache_dir())
    except (ValueError, ConnectionError) as error:
        raise type(error)(f"{error}. Models known by name: {', '.join(PRESETS)}; or give a size, such as 7B") from error
    return replace(_of_path(path), name=name)


def _of_hf_config(folder: Path, config: Mapping[str, Any]) -> PlannedModel:
    from jaxinfer.checkpoint.quantization_config import QUANTIZATION_KEYS, stored_layout
    from jaxinfer.models.families.wrapper import text_config
    from jaxinfer.models.registry import family_of_hf_config

    text = {key: value for key, value in text_config(config).items() if key not in QUANTIZATION_KEYS}
    family = family_of_hf_config(text)
    model, layout = family.model_config(text), stored_layout(folder, config)
    if layout is None:
        return PlannedModel(folder.name, model)
    from jaxinfer.checkpoint.checkpoint import open_checkpoint
    from jaxinfer.checkpoint.stored_formats import held_matrices, stored_matrices

    if any(folder.glob("*.safetensors")):
        matrices = held_matrices(open_checkpoint(folder))
    else:
        matrices = stored_matrices(layout, family, model)
    values: Counter[str] = Counter()
    for matrix in matrices:
        values[matrix.method or "fp16"] += matrix.values
    stored = WeightFormat(8 * sum(matrix.nbytes for matrix in matrices) / values.total())
    most = values.most_common(1)[0][0]
    return PlannedModel(folder.name, model, most, stored, layout.method, layout.names, str(layout))
