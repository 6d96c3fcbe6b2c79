"""What a decoder looks like: the numbers that fix every shape of the network."""

import math
import numbers
from dataclasses import dataclass, fields

from jaxinfer.models.rope_scaling import RopeScaling

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
NORMS = ("rms", "layer")
QK_NORMS = ("head", "heads", "full")
BLOCKS = ("sequential", "parallel", "parallel_shared_norm")
MAX_HIDDEN_VALUES = 1 << 27
"""Values of all experts' hidden layers that are held at a time: a longer step goes through in slices of its tokens."""
_MAY_BE_ZERO = frozenset(
    {"head_dim", "rotary_dim", "rope_length", "num_experts", "num_experts_per_tok", "moe_intermediate_size"}
    | {"shared_expert_intermediate_size"}
)
_LAYER_FLAGS = ("window_layers", "rope_layers", "moe_layers")


@dataclass(frozen=True)
class LayerKind:
    """In what a layer may differ from the others of its model.

    Attributes:
        window: how many positions, its own included, a token sees; None for all before it.
        rope: "global", "local" (`local_rope_theta`) or "none".
        moe: its feed-forward is a mixture of experts.
    """

    window: int | None
    rope: str
    moe: bool


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
        rope_freq_factors: divisors of the rotary frequencies, one for each pair of rotated channels, or None.
        rms_norm_eps: epsilon of the norms, whichever they are.
        hidden_act: activation of the MLP, one of ``ACTIVATIONS``.
        qkv_bias, o_bias, mlp_bias: whether those projections add a bias.
        tie_word_embeddings: the head is the embedding matrix.
        rotary_dim: channels of a head that are rotated, the first ones; 0 for all.
        rope_scaling: how the frequencies are stretched beyond the trained context; None for not.
        rope_length: tokens of the longest sequence that will be served, which is what scalings that depend on the
            length are fixed for. Defaults to `max_position_embeddings`.
        local_rope_theta: base of the windowed layers, which then rotate unscaled; None where all layers are alike.
        rope_layers: which layers rotate; None for all.
        learned_positions: a learned vector is added to the embedding for each position (GPT-2).
        sliding_window: a token sees so many positions, its own included, in the windowed layers; None for all.
        window_layers: which layers are windowed; None for all of them where there is a window.
        norm: "rms" (arXiv:1910.07467) or "layer" (arXiv:1607.06450).
        norm_bias: layer norms add a bias.
        norm_unit_offset: norms multiply by 1 + weight (Gemma).
        qk_norm: norm of queries and keys before the rotation: "head" (one weight of H for all heads), "heads" (each
            head its own), "full" (over all heads at once), or None.
        pre_norms, post_norms: norms before attention and MLP, and after them, before the residual sum.
        block: "sequential", or attention and MLP side by side: "parallel", "parallel_shared_norm" (one norm for both).
        attn_softcap, logit_softcap: ``cap * tanh(x / cap)`` on attention logits and on the final logits, or None.
        query_scale: factor on the attention logits; None for ``H ** -0.5``.
        embedding_multiplier, residual_multiplier, logit_multiplier: factors on the embedding, on what attention and MLP
            add, and on the final logits.
        mlp_gated: the MLP is ``down(act(gate(x)) * up(x))``, else ``down(act(up(x)))``.
        num_experts: experts of a mixture, E; 0 for none.
        num_experts_per_tok: experts that a token goes to.
        moe_intermediate_size: feed-forward width of one expert.
        shared_expert_intermediate_size: width of the expert that every token goes to, behind a sigmoid gate; 0 for
            none.
        renormalize_experts: the weights of a token's experts are divided by their sum.
        moe_layers: which layers have experts; None for all where there are experts.

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
    rotary_dim: int = 0
    rope_scaling: RopeScaling | None = None
    rope_length: int = 0
    local_rope_theta: float | None = None
    rope_layers: tuple[bool, ...] | None = None
    learned_positions: bool = False
    sliding_window: int | None = None
    window_layers: tuple[bool, ...] | None = None
    norm: str = "rms"
    norm_bias: bool = False
    norm_unit_offset: bool = False
    qk_norm: str | None = None
    pre_norms: bool = True
    post_norms: bool = False
    block: str = "sequential"
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    query_scale: float | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    mlp_gated: bool = True
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    renormalize_experts: bool = True
    moe_layers: tuple[bool, ...] | None = None

    def __post_init__(self) -> None:
        if not self.num_key_value_heads:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        for field in fields(self):
            self._check_number(field.name, field.type)
        if not self.head_dim:
            self._derive_head_dim()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} must divide num_attention_heads="
                f"{self.num_attention_heads}: every KV head serves the same number of query heads"
            )
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} must be even and positive: RoPE rotates pairs of channels")
        self._check_rope()
        self._check_choices()
        self._check_layers()

    def _check_number(self, name: str, kind: object) -> None:
        value = getattr(self, name)
        if kind is int or (kind == int | None and value is not None):
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise TypeError(f"{name}={value!r} must be an int")
            object.__setattr__(self, name, int(value))  # numpy's ints become Python's
            if value < (0 if name in _MAY_BE_ZERO else 1):
                raise ValueError(f"{name}={value} must be at least {0 if name in _MAY_BE_ZERO else 1}")
        elif (kind is float or (kind == float | None and value is not None)) and (
            isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value) or value <= 0
        ):
            raise ValueError(f"{name}={value!r} must be a number above 0")

    def _check_rope(self) -> None:
        if self.rotary_dim % 2 or self.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim={self.rotary_dim} must be even and at most head_dim={self.head_dim}")
        factors = self.rope_freq_factors
        if factors is not None and len(factors) != self.rotary_width // 2:
            raise ValueError(
                f"rope_freq_factors has {len(factors)} values; {self.rotary_width} rotated channels need "
                f"{self.rotary_width // 2}"
            )
        if factors is not None and not all(0 < factor < math.inf for factor in factors):
            raise ValueError(f"rope_freq_factors={factors} must be numbers above 0: frequencies are divided by them")
        if self.rope_scaling is not None:
            self.rope_scaling.check_theta(self.rope_theta)
            self.rope_scaling.check_rotary_dim(self.rotary_width)

    def _check_choices(self) -> None:
        choices = {"hidden_act": ACTIVATIONS, "norm": NORMS, "qk_norm": (None, *QK_NORMS), "block": BLOCKS}
        for name, allowed in choices.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"{name}={value!r} is not supported; use one of {', '.join(map(str, allowed))}")
        if not (self.pre_norms or self.post_norms):
            raise ValueError("pre_norms=False needs post_norms=True: a layer without any norm is not supported")
        if self.block != "sequential" and not self.pre_norms:
            raise ValueError(f"block={self.block!r} needs pre_norms=True")

    def _check_layers(self) -> None:
        for name in _LAYER_FLAGS:
            flags = getattr(self, name)
            if flags is not None and len(flags) != self.num_hidden_layers:
                raise ValueError(f"{name} has {len(flags)} entries for num_hidden_layers={self.num_hidden_layers}")
        if self.num_experts and not (0 < self.num_experts_per_tok <= self.num_experts):
            raise ValueError(
                f"num_experts_per_tok={self.num_experts_per_tok} must be 1 to num_experts={self.num_experts}"
            )
        if self.num_experts and not self.moe_intermediate_size:
            raise ValueError(f"num_experts={self.num_experts} needs moe_intermediate_size, the width of one expert")

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

    @property
    def rotary_width(self) -> int:
        """Channels of a head that are rotated, R."""
        return self.rotary_dim or self.head_dim

    def layer_kind(self, layer: int) -> LayerKind:
        """What is particular to one layer."""
        windowed = self.sliding_window is not None and (self.window_layers is None or self.window_layers[layer])
        rotates = not self.learned_positions and (self.rope_layers is None or self.rope_layers[layer])
        rope = "local" if windowed and self.local_rope_theta is not None else "global"
        moe = self.num_experts > 0 and (self.moe_layers is None or self.moe_layers[layer])
        return LayerKind(self.sliding_window if windowed else None, rope if rotates else "none", moe)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(map(self.layer_kind, range(self.num_hidden_layers)))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows that layers have; None is that of full attention."""
        return tuple(dict.fromkeys(kind.window for kind in self.layer_kinds))

    @property
    def widest_window(self) -> int | None:
        """How many positions, its own included, a token sees in the layer that sees furthest; None for all of them."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == len(self.windows) else None
