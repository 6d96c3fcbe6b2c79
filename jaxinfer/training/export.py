"""A trained model as an ordinary checkpoint in Hugging Face's layout."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.convert import MAX_SHARD_BYTES, take_tokenizer, write_json
from jaxinfer.checkpoint.hf_export import exported_config
from jaxinfer.checkpoint.leaf_shapes import flat, leaf_shapes
from jaxinfer.checkpoint.save import write_safetensors
from jaxinfer.typing import Params


def write_model(folder: Path, description: Checkpoint, tokenizer: Checkpoint, params: Params, dtype: str) -> None:
    """Writes weights, config, generation config and tokenizer; config.json, by which it is known, comes last.

    Args:
        folder: exists.
        description: of what is written: architecture, ends and settings; its weights are not read.
        tokenizer: the checkpoint whose tokenizer is written.
        params: the parameters.
        dtype: what they are written as: "float32", "bfloat16" or "float16".

    Raises:
        ValueError: no config.json can say what the model is (`exported_config`).
        OSError: a file cannot be written.
    """
    family, config = exported_config(description)
    leaves = flat(params)
    names = list(leaf_shapes(description.model_config, dtype))
    write_safetensors(
        folder,
        family,
        description.model_config,
        dtype,
        ((name, np.asarray(leaves[name])) for name in names),
        leaves=names,
        max_shard_bytes=MAX_SHARD_BYTES,
    )
    take_tokenizer(tokenizer, folder)
    written: dict[str, Any] = dict(config)
    written["torch_dtype" if "torch_dtype" in written else "dtype"] = dtype
    if description.generation_config:
        write_json(folder / "generation_config.json", description.generation_config)
    write_json(folder / "config.json", written)
