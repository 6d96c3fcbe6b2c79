"""From what a user calls a model to where it lies."""

import re
from pathlib import Path

from jaxinfer.checkpoint.builtin import BUILTIN_MODELS, fetch_builtin
from jaxinfer.checkpoint.hub import fetch_from_hub

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(
    model: str | Path,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    weights: bool = True,
    cache_dir: Path,
) -> Path:
    """Finds a model, downloading it if need be.

    Args:
        model: a path (directory or GGUF file), a built-in name, or a Hugging Face Hub id such as
            "meta-llama/Llama-2-7b-hf"; tried in that order.
        revision: branch, tag or commit of a Hub model.
        token: Hub access token of gated models; None uses the one huggingface_hub has stored, False none.
        weights: False fetches only the configuration and tokenizer of a Hub model.
        cache_dir: jaxinfer's cache folder, where built-in models are kept. (Hub models lie in huggingface_hub's own.)

    Returns:
        A directory or a GGUF file that exists.

    Raises:
        ValueError: there is no such path, name or Hub model, or access is denied.
        ConnectionError: it has to be downloaded and the network does not answer; says how to do without.
    """
    path = Path(model).expanduser()
    name = str(model)
    if name and path.exists():  # Path("") would be the current directory
        return path
    builtin = next((entry for entry in BUILTIN_MODELS if entry.name == name), None)
    if builtin is not None:
        return fetch_builtin(builtin, cache_dir)
    builtin_names = ", ".join(entry.name for entry in BUILTIN_MODELS)
    if isinstance(model, Path) or not HUB_ID.fullmatch(name) or path.suffix in (".gguf", ".safetensors"):
        raise ValueError(
            f"model={name!r} does not exist; give a model directory, a GGUF file, a Hub id (owner/name) or a built-in "
            f"name ({builtin_names})"
        )
    try:
        return fetch_from_hub(name, revision=revision, token=token, weights=weights)
    except (ValueError, ConnectionError) as error:
        if "/" in name:
            raise
        raise type(error)(f"{error}. Built-in names: {builtin_names}") from error
