"""From any checkpoint that loads to a directory of safetensors or Orbax, a parameter at a time."""

import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.hf_export import exported_config
from jaxinfer.checkpoint.load import read_leaves, resolve_dtype, stored_bytes
from jaxinfer.checkpoint.orbax_directory import PARAMS, OrbaxModel, StoredLeaf
from jaxinfer.checkpoint.output_directory import check_output, check_room, output_directory
from jaxinfer.checkpoint.tokenizer_files import write_tokenizer
from jaxinfer.progress_bar import ProgressBar

Format = Literal["safetensors", "orbax"]
FORMATS: tuple[Format, ...] = ("safetensors", "orbax")
MAX_SHARD_BYTES = 5 << 30


@dataclass(frozen=True)
class Conversion:
    """What was written.

    Args:
        path: the directory.
        format: "safetensors" or "orbax".
        dtype: of the parameters.
        num_params: number of values.
        nbytes: bytes of them; Orbax keeps them compressed.
        tokenizer: whether the model came with a tokenizer, which lies beside them now.
    """

    path: Path
    format: Format
    dtype: str
    num_params: int
    nbytes: int
    tokenizer: bool


def convert_checkpoint(
    model: str | Path,
    output: str | Path,
    format: Format,
    *,
    dtype: str = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = False,
) -> Conversion:
    """Writes a model directory that `LLM(output)` serves.

    At most a few parameters are in memory at a time. The directory appears when it is whole; a process killed before
    leaves nothing that loads, and the next conversion to the same place removes what it left.

    Args:
        model: a GGUF file, a Hugging Face directory, or an Orbax directory that `save_checkpoint` or this wrote.
        output: a directory that does not exist yet or is empty.
        format: "safetensors" (a Hugging Face directory) or "orbax".
        dtype: of the parameters: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own (bfloat16 for a
            quantised file, whose values only float32 keeps exactly).
        max_shard_bytes: size of a safetensors file, unless a single tensor is larger.
        progress: show a progress bar.

    Raises:
        ValueError: the model does not load, the output is not free, its disk has no room for the parameters, or no
            Hugging Face config can describe the model.
        OSError: writing failed; nothing is left.
    """
    if format not in FORMATS:
        raise ValueError(f"format={format!r} must be 'safetensors' or 'orbax'")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    from jaxinfer.checkpoint.leaf_shapes import leaf_shapes

    check_output(output)
    checkpoint = open_checkpoint(Path(model).expanduser())
    dtype = checkpoint.dtype if dtype == "auto" else resolve_dtype(dtype, checkpoint.dtype, "any")
    specs = leaf_shapes(checkpoint.model_config, dtype)
    if format == "safetensors":  # Orbax compresses
        check_room(output, sum(spec.size * spec.dtype.itemsize for spec in specs.values()))
    with output_directory(output) as folder:
        has_tokenizer = take_tokenizer(checkpoint, folder)
        if format == "orbax":
            written = _write_orbax(checkpoint, folder, dtype, specs, progress)
        else:
            written = _write_safetensors(checkpoint, folder, dtype, specs, max_shard_bytes, progress)
    return Conversion(Path(output), format, dtype, *written, tokenizer=has_tokenizer)


def _write_safetensors(
    checkpoint: Checkpoint, folder: Path, dtype: str, specs: Mapping[str, Any], max_shard_bytes: int, progress: bool
) -> tuple[int, int]:
    from jaxinfer.checkpoint.save import write_safetensors

    family, config = exported_config(checkpoint)
    nbytes = write_safetensors(
        folder,
        family,
        checkpoint.model_config,
        dtype,
        _stream(checkpoint, dtype, progress),
        leaves=list(specs),
        max_shard_bytes=max_shard_bytes,
    )
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if checkpoint.generation_config:
        write_json(folder / "generation_config.json", checkpoint.generation_config)
    write_json(folder / "config.json", config)  # last: without it nothing loads
    return sum(spec.size for spec in specs.values()), nbytes


def _write_orbax(
    checkpoint: Checkpoint, folder: Path, dtype: str, specs: Mapping[str, Any], progress: bool
) -> tuple[int, int]:
    from jaxinfer.checkpoint.orbax import write_description
    from jaxinfer.checkpoint.orbax_io import write_stream

    write_stream(folder / PARAMS, specs, _stream(checkpoint, dtype, progress))
    leaves = {name: StoredLeaf(tuple(spec.shape), dtype) for name, spec in specs.items()}
    try:
        hf_config: dict[str, Any] | None = exported_config(checkpoint)[1]
    except ValueError:
        hf_config = None  # only needed to go on to safetensors, which says so then
    model = OrbaxModel(checkpoint.model_config, dtype, leaves, checkpoint.eos_token_ids, hf_config)
    write_description(folder, model, checkpoint.generation_config)
    return sum(leaf.size for leaf in leaves.values()), sum(leaf.nbytes for leaf in leaves.values())


def _stream(checkpoint: Checkpoint, dtype: str, progress: bool) -> Iterator[tuple[str, np.ndarray]]:
    with ProgressBar(
        total=stored_bytes(checkpoint), desc="Converting", unit="B", unit_scale=True, disable=not progress
    ) as bar:
        for name, values in read_leaves(checkpoint, dtype, on_bytes=bar.update):
            if dtype == "float16" and not np.isfinite(values).all():
                warnings.warn(f"parameter {name!r} has values beyond float16's 65504; use bfloat16", stacklevel=2)
            yield name, values


def take_tokenizer(checkpoint: Checkpoint, folder: Path) -> bool:
    """Writes the model's tokenizer; whether there was one (weights without are served by token ids)."""
    try:
        write_tokenizer(checkpoint.path, folder)
    except ValueError as error:
        warnings.warn(f"no tokenizer is written: {error}", stacklevel=3)
        return False
    return True


def write_json(path: Path, content: Any) -> None:
    """Writes a mapping as a file that people can read."""
    path.write_text(json.dumps(dict(content), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
