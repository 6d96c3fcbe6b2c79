"""How a model is cut into equal parts: the sizes of what one device has, and of all the parts together."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from jaxinfer.models.config import ModelConfig


@dataclass(frozen=True)
class ModelSplit:
    """A model over several devices.

    Sizes that do not divide are padded with zeros, which change nothing: rows of the vocabulary (that can never be
    drawn), feed-forward channels, experts (that no token goes to). Where devices are more than KV heads, or their parts
    would cut one's queries, each KV head is repeated, with a part of its queries: the model is then one of more KV
    heads of smaller groups.

    Attributes:
        model: the whole.
        num_parts: devices.
        splits_experts: a mixture's experts are dealt out whole (expert parallelism), instead of each being cut.
        ffn_unit: feed-forward channels that lie together, such as those of a group that shares a scale.
        expert_unit: the same of an expert's channels.

    Raises:
        ValueError: the query heads cannot be dealt out evenly, naming the numbers of devices that work.
    """

    model: ModelConfig
    num_parts: int = 1
    splits_experts: bool = False
    ffn_unit: int = 1
    expert_unit: int = 1

    def __post_init__(self) -> None:
        model, count = self.model, self.num_parts
        if model.num_attention_heads % count:
            sizes = ", ".join(str(size) for size in range(1, model.num_attention_heads + 1) if self._divides(size))
            raise ValueError(
                f"tensor_parallel_size={count} cannot deal out num_attention_heads={model.num_attention_heads} evenly; "
                f"use one of {sizes}"
            )
        if self.splits_experts and not model.num_experts:
            raise ValueError("enable_expert_parallel=True needs a model with experts, and this one has none")
        if count > 1 and model.num_experts and model.mlp_bias and model.shared_expert_intermediate_size:
            raise ValueError(f"tensor_parallel_size={count}: a shared expert with mlp_bias=True is not split; use 1")

    def _divides(self, count: int) -> bool:
        return self.model.num_attention_heads % count == 0

    @property
    def copies(self) -> int:
        """How often each KV head is repeated, r."""
        groups = self.model.num_query_groups
        return groups // math.gcd(groups, self.model.num_attention_heads // self.num_parts)

    @cached_property
    def padded(self) -> ModelConfig:
        """Sizes of all parts together."""
        model = self.model
        if self.num_parts == 1:
            return model
        return replace(
            model,
            head_dim=model.head_dim,
            num_key_value_heads=model.num_key_value_heads * self.copies,
            vocab_size=self.up(model.vocab_size),
            intermediate_size=self.up(model.intermediate_size, self.ffn_unit),
            moe_intermediate_size=self.expert_width(model.moe_intermediate_size),
            shared_expert_intermediate_size=self.up(model.shared_expert_intermediate_size, self.ffn_unit),
        )

    @property
    def num_experts(self) -> int:
        """E of all parts together."""
        return self.up(self.model.num_experts) if self.splits_experts else self.model.num_experts

    @cached_property
    def part(self) -> ModelConfig:
        """Sizes of one part; `num_experts` stays that of the router."""
        whole, count = self.padded, self.num_parts
        if count == 1:
            return self.model
        return replace(
            whole,
            num_attention_heads=whole.num_attention_heads // count,
            num_key_value_heads=whole.num_key_value_heads // count,
            vocab_size=whole.vocab_size // count,
            intermediate_size=whole.intermediate_size // count,
            moe_intermediate_size=whole.moe_intermediate_size // (1 if self.splits_experts else count),
            shared_expert_intermediate_size=whole.shared_expert_intermediate_size // count,
        )

    def up(self, size: int, unit: int = 1) -> int:
        """A size padded so that every part has the same, in multiples of `unit`."""
        each = self.num_parts * unit
        return -(-size // each) * each

    def expert_width(self, size: int) -> int:
        """Channels of an expert in all parts together."""
        return size if self.splits_experts else self.up(size, self.expert_unit)
