"""What a family table is made of: config keys, weight names, and where each weight goes."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.models.config import LayerKind, ModelConfig

LeafIndex = tuple[Any, ...]

# Where the parts of a fused leaf lie (jaxinfer.typing has the axis letters).
WHOLE: LeafIndex = ()
QUERY: LeafIndex = np.s_[:, :-2]  # qkv is [K, G + 2, ...]: a group's queries, then its key, then its value
KEY: LeafIndex = np.s_[:, -2]
VALUE: LeafIndex = np.s_[:, -1]
GATE: LeafIndex = np.s_[0, ...]
UP: LeafIndex = np.s_[1, ...]


@dataclass(frozen=True)
class Weight:
    """One line of a weight table: a checkpoint tensor, or a part of one, and the part of a parameter leaf it fills.

    Args:
        hf: tensor name in safetensors files; ``{i}`` is the layer, ``{e}`` the item of `each`. Empty for not there.
        gguf: tensor name in GGUF files, likewise.
        leaf: path in the parameter tree.
        shape: the checkpoint tensor's shape in axis letters and digits, e.g. ``"NH D"`` for ``[N * H, D]``. Flattened
            in C order it equals the leaf's part, so that filling is a reshape.
        part: index of the leaf (its axes in the order of `axes`) that selects the part.
        axes: permutation of the leaf's axes that puts them in the tensor's order.
        each: letter whose items are tensors of their own, as the experts "E" or heads "N"; they are the part's first
            axes.
        before, after: rows of the tensor, in axis letters, that lie before and after what goes here.
        rotary: rows are rotated channels, which some files store in pairs.
        when: whether a model of this config has the weight.
        layers: the layers of a config that have it.
    """

    hf: str
    gguf: str
    leaf: str
    shape: str
    part: LeafIndex = WHOLE
    rotary: bool = False
    when: Callable[[ModelConfig], bool] = lambda config: True
    axes: tuple[int, ...] = ()
    each: str = ""
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    layers: Callable[[LayerKind], bool] = lambda kind: True

    def tensor_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Shape the checkpoint's tensor must have."""
        first, *rest = self.part_shape(config)
        return (first + sum(_size(config, axes) for axes in (*self.before, *self.after)), *rest)

    def part_shape(self, config: ModelConfig) -> tuple[int, ...]:
        """Shape of the tensor's part that goes here."""
        return tuple(_size(config, axes) for axes in self.shape.split())

    def first_row(self, config: ModelConfig) -> int:
        """Where that part begins in the tensor."""
        return sum(_size(config, axes) for axes in self.before)

    def channel_size(self, config: ModelConfig) -> int:
        """Values of one channel of a head: of the axes behind H."""
        return _size(config, self.shape.replace(" ", "").partition("H")[2])

    def items(self, config: ModelConfig) -> int:
        """How many tensors of that name there are in a layer."""
        return _size(config, self.each)


def _size(config: ModelConfig, axes: str) -> int:
    sizes = {
        "V": config.vocab_size,
        "D": config.hidden_size,
        "F": config.intermediate_size,
        "N": config.num_attention_heads,
        "K": config.num_key_value_heads,
        "H": config.head_dim,
        "E": config.num_experts,
        "M": config.moe_intermediate_size,
        "S": config.shared_expert_intermediate_size,
        "P": config.max_position_embeddings,
    }
    return math.prod(int(letter) if letter.isdigit() else sizes[letter] for letter in axes)


@dataclass(frozen=True)
class Family:
    """All that is particular to one model family.

    Args:
        name: Hugging Face's ``model_type``.
        architectures: class names that config.json may carry.
        model_config: makes a ModelConfig from a Hugging Face config.
        config_keys: config keys that `model_config` reads.
        ignored_keys: config keys that do not change inference.
        weights: the weight table.
        ignored_weights: endings of tensor names that carry nothing we need.
        gguf_architectures: ``general.architecture`` of the GGUF files that it loads.
        gguf_config: adds to a GGUF file's settings, by Hugging Face's names, what the file leaves unsaid.
        optional_prefix: beginning of the tensor names that some files leave out.
        pairwise_rotary, gguf_pairwise_rotary: files keep channel pairs of rotary weights side by side (2j, 2j + 1), not
            half a head apart.
    """

    name: str
    architectures: tuple[str, ...]
    model_config: Callable[[Mapping[str, Any]], ModelConfig]
    config_keys: frozenset[str]
    weights: tuple[Weight, ...]
    ignored_keys: frozenset[str] = frozenset()
    ignored_weights: tuple[str, ...] = field(default=(".rotary_emb.inv_freq", ".attn_rot_embd.weight"))
    optional_prefix: str = ""
    pairwise_rotary: bool = False
    gguf_pairwise_rotary: bool = False
    gguf_architectures: tuple[str, ...] = ()
    gguf_config: Callable[[Mapping[str, Any]], dict[str, Any]] = dict

    @property
    def has_experts(self) -> bool:
        """Whether its models are mixtures of experts."""
        return "num_experts_per_tok" in self.config_keys

    def unknown_keys(self, hf_config: Mapping[str, Any]) -> list[str]:
        """Config keys that nobody reads and nobody declared harmless."""
        return sorted(key for key in hf_config if key not in self.config_keys | self.ignored_keys | COMMON_IGNORED_KEYS)


# Keys of training, of tokenization or of the transformers library itself, whatever the family.
# fmt: off
COMMON_IGNORED_KEYS = frozenset({
    "architectures", "model_type", "auto_map", "_name_or_path", "transformers_version", "_commit_hash", "torchscript",
    "torch_dtype", "dtype", "use_cache", "return_dict", "output_attentions", "output_hidden_states", "bos_token_id",
    "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "tokenizer_class", "attention_dropout",
    "hidden_dropout", "resid_pdrop", "embd_pdrop", "initializer_range", "gradient_checkpointing", "pretraining_tp",
    "problem_type", "id2label", "label2id", "chunk_size_feed_forward", "is_encoder_decoder", "is_decoder",
    "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "cache_implementation",
    "is_llama_config", "transformers.js_config", "_model_name_or_path",
})
# fmt: on
