"""Models of the Hugging Face Hub, through huggingface_hub and its cache."""

from pathlib import Path

from jaxinfer.checkpoint.hf_directory import INDEX, read_json

# Weights as safetensors, never pickles (nor GGUF: such repositories hold a dozen variants); the rest is what configs
# and tokenizers need. Mistral's consolidated files hold the same weights once more, by other names.
SETTINGS = ["*.json", "tokenizer.model", "*.jinja"]
WANTED = [*SETTINGS, "*.safetensors"]
UNWANTED = ["original/*", "onnx/*", "*/*.safetensors", "consolidated*"]
TOKENIZERS = ("tokenizer.json", "tokenizer.model")


def fetch_from_hub(
    repo_id: str, *, revision: str | None = None, token: str | bool | None = None, weights: bool = True
) -> Path:
    """Returns the snapshot directory of a Hub model: the cached one if complete, else it is downloaded with progress.

    Args:
        repo_id: "owner/name".
        revision: branch, tag or commit; None is the main branch.
        token: access token; None uses the one huggingface_hub has stored, False none.
        weights: False fetches configuration and tokenizer only.

    Raises:
        ValueError: no such model or revision, nothing that can be used in it, or access is denied.
        ConnectionError: not (wholly) cached and the Hub cannot be reached.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    cached = _cached(repo_id, revision)
    if cached is not None and _has_tokenizer(cached) and (not weights or _has_weights(cached)):
        return cached
    patterns = WANTED if weights else SETTINGS
    try:
        snapshot = Path(
            snapshot_download(
                repo_id, revision=revision, token=token, allow_patterns=patterns, ignore_patterns=UNWANTED
            )
        )
    except (HFValidationError, OSError) as error:  # every HTTP error of huggingface_hub is an OSError
        if weights and cached is not None and _has_weights(cached):
            return cached  # only the tokenizer is not there, and the caller may have another
        raise _explained(error, repo_id, revision) from error
    if not weights:
        return snapshot
    if _has_weights(snapshot):
        return snapshot
    if any(snapshot.glob("*.safetensors*")):
        # Without a network huggingface_hub may answer with what is there, whole or not.
        raise _explained(ConnectionError("only a part of the weights is there"), repo_id, revision)
    raise ValueError(
        f"model={repo_id!r} has no config.json with safetensors weights on the Hub. Of a repository of GGUF files "
        f"download one (`hf download {repo_id} FILE`) and give its path; pickle files are refused"
    )


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
            f"model={repo_id!r} is gated: accept its licence on its Hub page and pass hf_token=... or run "
            "`hf auth login`"
        )
    if isinstance(error, RevisionNotFoundError):
        return ValueError(f"revision={revision!r} of model={repo_id!r} does not exist")
    if isinstance(error, RepositoryNotFoundError | HFValidationError):
        return ValueError(
            f"model={repo_id!r} is neither a local path nor a model of the Hub; check the spelling, and for a private "
            "one pass hf_token=..."
        )
    return ConnectionError(
        f"model={repo_id!r} is not (wholly) in the local Hub cache and the Hub cannot be reached "
        f"({type(error).__name__}). Either run `hf download {repo_id}` where there is a network, bring its cache here "
        "and point HF_HOME at it, or give the path of a local model directory or GGUF file"
    )


def _cached(repo_id: str, revision: str | None) -> Path | None:
    """The snapshot in the local cache, whole or not; whatever else of the repository was never fetched."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in ("config.json", *TOKENIZERS):
        try:
            found = try_to_load_from_cache(repo_id, name, revision=revision)
        except HFValidationError:
            return None
        if isinstance(found, str):
            return Path(found).parent
    return None


def _has_weights(snapshot: Path) -> bool:
    """Whether config.json and all the weights are there."""
    if not (snapshot / "config.json").is_file():
        return False
    if (snapshot / INDEX).is_file():
        shards = set(read_json(snapshot / INDEX).get("weight_map", {}).values())
        return all((snapshot / shard).is_file() for shard in shards)
    return any("-of-" not in file.name for file in snapshot.glob("*.safetensors"))


def _has_tokenizer(snapshot: Path) -> bool:
    return any((snapshot / name).is_file() for name in TOKENIZERS)
