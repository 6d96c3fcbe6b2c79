"""Where a Hugging Face directory says that its weights are quantised."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.checkpoint.hf_directory import read_json

if TYPE_CHECKING:
    from jaxinfer.quant.layouts.layout import Layout

# Keys of config.json, and files beside it that older tools write, with the method that they are of.
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def stored_layout(path: Path, config: Mapping[str, Any]) -> "Layout | None":
    """How the directory's quantised matrices are packed; None where nothing is said of any.

    Args:
        path: the directory.
        config: its config.json.

    Raises:
        ValueError: the method or one of its settings is not supported; names file, setting and remedy.
    """
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    places = [(path / "config.json", part.get(key)) for part in parts for key in QUANTIZATION_KEYS]
    places += [
        (path / name, {"quant_method": method, **read_json(path / name)})
        for name, method in _FILES.items()
        if (path / name).is_file()
    ]
    source, said = next(((source, said) for source, said in places if said), (path, None))
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise ValueError(f"{source}: quantization_config={said!r} must be a mapping, with its quant_method")
    from jaxinfer.quant.layouts.registry import layout_of

    try:
        return layout_of(said)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
