"""Opening a checkpoint: everything is known and checked, nothing is loaded."""

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.checkpoint import gguf_config, hf_directory, orbax_directory
from jaxinfer.checkpoint.gguf import read_gguf
from jaxinfer.checkpoint.orbax_directory import StoredLeaf
from jaxinfer.checkpoint.packed_module import PackedModule
from jaxinfer.checkpoint.quantization_config import QUANTIZATION_KEYS, stored_layout
from jaxinfer.checkpoint.safetensors import refuse_others
from jaxinfer.checkpoint.tensor import Tensor, stored_dtype
from jaxinfer.checkpoint.weight_map import (
    NameStyle,
    Placement,
    complete_names,
    embedding_name,
    head_name,
    place_weights,
)
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.families import wrapper
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.hf_config import reading
from jaxinfer.models.registry import family_of_gguf, family_of_hf_config

if TYPE_CHECKING:
    from jaxinfer.quant.layouts.layout import Layout
    from jaxinfer.tokenizers.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint whose weights are still in their files.

    Args:
        path: a GGUF file, a Hugging Face model directory, or an Orbax model directory.
        model_config: the network's architecture.
        dtype: the type its weights are meant for: "float32", "bfloat16" or "float16".
        eos_token_ids: ids that end a generation according to config and generation config (not the tokenizer).
        generation_config: sampling defaults that come with it, by Hugging Face's names; empty if none.
        placements: where each tensor goes; empty for an Orbax directory, which holds `leaves`, and without weights.
        tied_head: the embedding and a head stored beside it although the config ties them; None without one.
        metadata: a GGUF file's metadata; None for a directory.
        family: the table that names its tensors; None for an Orbax directory, whose tensors are parameters.
        hf_config: its settings by Hugging Face's names; None where they are not known.
        leaves: parameters of an Orbax directory by their path; None for other kinds.
        layout: how its quantised matrices are packed; None for a checkpoint without.
    """

    path: Path
    model_config: ModelConfig
    dtype: str
    eos_token_ids: frozenset[int]
    generation_config: Mapping[str, Any]
    placements: tuple[Placement, ...]
    tied_head: tuple[Tensor, Tensor] | None = None
    metadata: Mapping[str, Any] | None = field(default=None, repr=False)
    family: Family | None = field(default=None, repr=False)
    hf_config: Mapping[str, Any] | None = field(default=None, repr=False)
    leaves: Mapping[str, StoredLeaf] | None = field(default=None, repr=False)
    layout: "Layout | None" = None

    @property
    def has_weights(self) -> bool:
        """Whether there is anything to load."""
        return bool(self.placements or self.leaves)

    def tokenizer(self) -> "Tokenizer":
        """Loads the tokenizer that lies beside or inside the weights.

        Raises:
            ValueError: there is none, or its kind is not supported.
        """
        if self.metadata is not None:
            from jaxinfer.tokenizers.gguf import GGUFTokenizer

            return GGUFTokenizer.from_metadata(self.metadata)
        from jaxinfer.tokenizers.load import load_tokenizer

        return load_tokenizer(self.path)


def open_checkpoint(path: Path, *, needs_weights: bool = True) -> Checkpoint:
    """Reads configuration and tensor tables, and checks that they belong together. No weight is read, but for biases
    that the model has no place for in a quantised checkpoint: these must be 0.

    Args:
        path: a GGUF file, or a directory: with config.json and safetensors files, with what `save_checkpoint` wrote, or
            with a single GGUF file.
        needs_weights: False lets a Hugging Face directory have none.

    Raises:
        ValueError: not a checkpoint, unsupported, corrupt, truncated or incomplete; names the file or tensor.
    """
    path = Path(path)
    if (path / orbax_directory.DESCRIPTION).is_file():
        return _open_orbax(path)
    orbax_directory.refuse_foreign(path)
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if not files:
            raise ValueError(f"{path} is not a model directory: it has no config.json")
        if len(files) > 1:
            raise ValueError(
                f"{path} has several GGUF files; give one of them: {', '.join(file.name for file in files)}"
            )
        path = files[0]
    if path.is_dir():
        return _open_directory(path, needs_weights)
    if not path.is_file():
        raise ValueError(f"{path} is neither a file nor a folder" if path.exists() else f"{path} does not exist")
    if path.suffix in hf_directory.PICKLES:
        raise ValueError(hf_directory.pickle_refusal(path))
    if path.suffix == ".safetensors":
        raise ValueError(f"{path} holds weights only; give its directory, which has config.json and the tokenizer")
    return _open_gguf(path)


def _open_directory(path: Path, needs_weights: bool) -> Checkpoint:
    said = hf_directory.read_json(path / "config.json")
    generation_path = path / "generation_config.json"
    generation = hf_directory.read_json(generation_path) if generation_path.is_file() else {}
    layout = stored_layout(path, said)
    with reading(path / "config.json"):
        config = wrapper.text_config(said)
        config = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
        family = family_of_hf_config(config)
        model_config = family.model_config(config)
    vocab_size = model_config.vocab_size
    ends = _eos_ids(path / "config.json", config, vocab_size) | _eos_ids(generation_path, generation, vocab_size)
    _warn_unknown(path / "config.json", family.unknown_keys(config))
    bare = not needs_weights and not hf_directory.has_weights(path)
    tensors: Mapping[str, Tensor] = {} if bare else hf_directory.read_tensors(path)
    if wrapper.wrapper_of(said) is not None:
        config["architectures"] = [family.architectures[0]]
        tensors = _text_tensors(path, said, tensors)
    tensors = complete_names(family, tensors)
    placements = () if bare else place_weights(family, model_config, tensors, "hf", path, layout)
    read = [placement.tensor for placement in placements]
    refuse_others(tensor for tensor in read if not isinstance(tensor, PackedModule))
    return Checkpoint(
        path=path,
        model_config=model_config,
        dtype=_declared_dtype(config) or stored_dtype(read),
        eos_token_ids=ends,
        generation_config=generation,
        placements=placements,
        tied_head=_tied_head(family, model_config, tensors, "hf"),
        family=family,
        hf_config=config,
        layout=layout,
    )


def _text_tensors(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The text model's tensors by its own names; what is left out is told once."""
    text = {name: wrapper.text_name(name) for name in tensors}
    left_out = Counter(wrapper.part_of(name) for name, own in text.items() if own is None)
    parts = [f"{count} tensors of {part}" for part, count in left_out.items()]
    settings = wrapper.unread_keys(config)
    warnings.warn(
        f"{path}: only the text model of {wrapper.wrapper_of(config)} is loaded. Not used: "
        f"{', '.join(parts) or 'no tensor'}; settings {', '.join(settings) or 'none'}",
        stacklevel=4,
    )
    return {own: tensors[name] for name, own in text.items() if own is not None}


def _open_orbax(path: Path) -> Checkpoint:
    model = orbax_directory.read_description(path)
    generation_path = path / "generation_config.json"
    generation = hf_directory.read_json(generation_path) if generation_path.is_file() else {}
    return Checkpoint(
        path=path,
        model_config=model.model_config,
        dtype=model.dtype,
        eos_token_ids=model.eos_token_ids | _eos_ids(generation_path, generation, model.model_config.vocab_size),
        generation_config=generation,
        placements=(),
        hf_config=model.hf_config,
        leaves=model.leaves,
    )


def _open_gguf(path: Path) -> Checkpoint:
    from jaxinfer.tokenizers.gguf import end_ids

    file = read_gguf(path)
    metadata, tensors = file.metadata, file.tensors
    with reading(path):
        architecture = str(metadata.get("general.architecture"))
        family = family_of_gguf(architecture, experts=bool(metadata.get(f"{architecture}.expert_count")))
        hf_config, unknown = gguf_config.hf_config_of(family, metadata, tensors)
        model_config = gguf_config.model_config_of(family, hf_config, metadata, tensors)
    _warn_unknown(path, unknown)
    weights = {name: tensor for name, tensor in tensors.items() if name not in gguf_config.NOT_PARAMETERS}
    return Checkpoint(
        path=path,
        model_config=model_config,
        dtype=stored_dtype(weights.values()),
        eos_token_ids=end_ids(metadata),
        generation_config={name: metadata[key] for key, name in gguf_config.SAMPLING_KEYS.items() if key in metadata},
        placements=place_weights(family, model_config, weights, "gguf", path),
        metadata=metadata,
        family=family,
        hf_config=hf_config,
    )


def _tied_head(
    family: Family, config: ModelConfig, tensors: Mapping[str, Tensor], style: NameStyle
) -> tuple[Tensor, Tensor] | None:
    head = tensors.get(head_name(family, style))
    if not config.tie_word_embeddings or head is None or not head.size:
        return None
    return tensors[embedding_name(family, style)], head


def _declared_dtype(config: Mapping[str, Any]) -> str | None:
    declared = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    return declared if declared in DTYPES else None


def _eos_ids(source: Path, config: Mapping[str, Any], vocab_size: int) -> frozenset[int]:
    """End-of-sequence ids of a config, where they may be an int, a list or null; 0 is an id.

    What is outside the vocabulary, as -1 for none, can never end a text: it is left out with a warning.
    """
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
        raise ValueError(f"{source}: eos_token_id={value!r} must be a token id, a list of them, or null")
    ids = frozenset(item for item in values if 0 <= item < vocab_size)
    if outside := sorted(set(values) - ids):
        warnings.warn(
            f"{source}: eos_token_id={value!r} names {outside[0]}, which is outside the vocabulary's ids 0 to "
            f"{vocab_size - 1} and ends nothing",
            stacklevel=4,
        )
    return ids


def _warn_unknown(source: Path, keys: list[str]) -> None:
    if keys:
        warnings.warn(f"{source}: unknown settings are not used: {', '.join(keys)}", stacklevel=3)
