"""What a decoder looks like: the numbers that fix every shape of the network."""

import numbers
from dataclasses import dataclass, fields

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of one decoder-only transformer, in Hugging Face's names.

    A family table (``jaxinfer.models.families``) makes one from a checkpoint's own config; users with live parameters
    construct it directly. Multi-head, grouped-query and multi-query attention are ``num_key_value_heads`` equal to,
    between, and below ``num_attention_heads``.

    Args:
        vocab_size: rows of the embedding and of the head, V.
        hidden_size: model width, D.
        intermediate_size: feed-forward width, F.
        num_hidden_layers: number of decoder layers.
        num_attention_heads: query heads, N.
        num_key_value_heads: key/value heads, K; must divide N. Defaults to N.
        head_dim: width of one head, H. Defaults to D / N.
        max_position_embeddings: longest context the model was trained for, in tokens.
        rope_theta: base of the rotary frequencies (RoPE, arXiv:2104.09864).
        rope_freq_factors: divisors of the H/2 rotary frequencies, or None for plain RoPE.
        rms_norm_eps: epsilon of RMSNorm (arXiv:1910.07467).
        hidden_act: activation of the gated MLP, one of ``ACTIVATIONS``.
        qkv_bias, o_bias, mlp_bias: whether those projections add a bias.
        tie_word_embeddings: the head is the embedding matrix.

    Raises:
        ValueError: a field is out of range, naming field, value and remedy.
        TypeError: a size is no int.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0
    head_dim: int = 0
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rope_freq_factors: tuple[float, ...] | None = None
    rms_norm_eps: float = 1e-5
    hidden_act: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                    raise TypeError(f"{field.name}={value!r} must be an int")
                object.__setattr__(self, field.name, int(value))  # numpy's ints become Python's
                if field.name != "head_dim" and value < 1:
                    raise ValueError(f"{field.name}={value} must be at least 1")
            elif field.type is float and (isinstance(value, bool) or not isinstance(value, numbers.Real) or value <= 0):
                raise ValueError(f"{field.name}={value!r} must be a number above 0")
        if not self.head_dim:
            self._derive_head_dim()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads="
                f"{self.num_attention_heads}: every KV head serves the same number of query heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even and positive: RoPE rotates pairs of channels")
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act={self.hidden_act!r} is not supported; use one of {', '.join(ACTIVATIONS)}")
        factors = self.rope_freq_factors
        if factors is not None and len(factors) != self.head_dim // 2:
            raise ValueError(
                f"rope_freq_factors has {len(factors)} values; head_dim={self.head_dim} needs {self.head_dim // 2}"
            )

    def _derive_head_dim(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}; "
                "give head_dim explicitly"
            )
        object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def num_query_groups(self) -> int:
        """Query heads per KV head, G."""
        return self.num_attention_heads // self.num_key_value_heads
