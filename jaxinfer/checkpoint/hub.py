"""Models of the Hugging Face Hub, through huggingface_hub and its cache."""

from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.checkpoint.hf_directory import INDEX, read_json

if TYPE_CHECKING:
    from collections.abc import Callable

# Weights as safetensors, never pickles (nor GGUF: such repositories hold a dozen variants); the rest is what configs
# and tokenizers need.
WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
UNWANTED = ["original/*", "onnx/*", "*/*.safetensors"]


def fetch_from_hub(repo_id: str, *, revision: str | None = None, token: str | None = None) -> Path:
    """Returns the snapshot directory of a Hub model: the cached one if complete, else it is downloaded with progress.

    Raises:
        ValueError: no such model or revision, no safetensors in it, or access is denied.
        ConnectionError: not (wholly) cached and the Hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    def download(local_files_only: bool) -> Path:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                token=token,
                allow_patterns=WANTED,
                ignore_patterns=UNWANTED,
                local_files_only=local_files_only,
            )
        )

    cached = _cached(download)
    if cached is not None:
        return cached
    try:
        snapshot = download(local_files_only=False)
    except (HFValidationError, OSError) as error:  # every HTTP error of huggingface_hub is an OSError
        raise _explained(error, repo_id, revision) from error
    if not _is_complete(snapshot):
        raise ValueError(
            f"model={repo_id!r} has no config.json with safetensors weights on the Hub. Of a repository of GGUF files "
            f"download one (`hf download {repo_id} FILE`) and give its path; pickle files are refused"
        )
    return snapshot


def _explained(error: Exception, repo_id: str, revision: str | None) -> ValueError | ConnectionError:
    """What a failed download means for the user."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return ValueError(
            f"model={repo_id!r} is gated: accept its licence on its Hub page and pass token=... or run `hf auth login`"
        )
    if isinstance(error, RevisionNotFoundError):
        return ValueError(f"revision={revision!r} of model={repo_id!r} does not exist")
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return ValueError(
            f"model={repo_id!r} is neither a local path nor a model of the Hub; check the spelling, and for a private "
            "one pass token=..."
        )
    return ConnectionError(
        f"model={repo_id!r} is not in the local Hub cache and the Hub cannot be reached ({type(error).__name__}). "
        f"Either run `hf download {repo_id}` where there is a network, bring its cache here and point HF_HOME "
        "at it, or give the path of a local model directory or GGUF file"
    )


def _cached(download: "Callable[[bool], Path]") -> Path | None:
    """The snapshot in the local cache, unless there is none or some of its weights are missing."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = download(True)
    except (LocalEntryNotFoundError, FileNotFoundError):
        return None
    return snapshot if _is_complete(snapshot) else None


def _is_complete(snapshot: Path) -> bool:
    if not (snapshot / "config.json").is_file():
        return False
    if (snapshot / INDEX).is_file():
        shards = set(read_json(snapshot / INDEX).get("weight_map", {}).values())
        return all((snapshot / shard).is_file() for shard in shards)
    return any(snapshot.glob("*.safetensors"))
