"""Lines of the weight tables that many families share: the tensor names of Llama's descendants."""

from collections.abc import Callable
from dataclasses import replace

from jaxinfer.models.config import LayerKind, ModelConfig
from jaxinfer.models.families.family import GATE, KEY, QUERY, UP, VALUE, WHOLE, LeafIndex, Weight


def norm(
    hf: str, gguf: str, leaf: str, when: Callable[[ModelConfig], bool] = lambda config: True
) -> tuple[Weight, Weight]:
    """A norm's weight and, where the model's norms have one, its bias; names without their ending."""
    return (
        Weight(f"{hf}.weight", gguf and f"{gguf}.weight", f"{leaf}/scale", "D", when=when),
        Weight(f"{hf}.bias", gguf and f"{gguf}.bias", f"{leaf}/bias", "D", when=lambda c: c.norm_bias and when(c)),
    )


def layer_norm(
    hf: str, gguf: str, leaf: str, when: Callable[[ModelConfig], bool] = lambda config: True
) -> tuple[Weight, Weight]:
    """`norm` in every layer."""
    return norm(f"model.layers.{{i}}.{hf}", f"blk.{{i}}.{gguf}", f"layers_{{i}}/{leaf}", when)


def qk_norms(shape: str = "H", k_shape: str = "", rotary: bool = False) -> tuple[Weight, ...]:
    """The norms of queries and keys, which have no bias."""
    hf, gguf, leaf = "model.layers.{i}.self_attn.", "blk.{i}.attn_", "layers_{i}/attn/"
    shapes = {"q_norm": shape, "k_norm": k_shape or shape}
    return tuple(
        Weight(
            f"{hf}{name}.weight",
            f"{gguf}{name}.weight",
            f"{leaf}{name}/scale",
            shapes[name],
            rotary=rotary,
            when=lambda c: c.qk_norm is not None,
        )
        for name in shapes
    )


def _qkv(part: str, index: LeafIndex, heads: str, rotary: bool) -> tuple[Weight, Weight]:
    hf, gguf, leaf = f"model.layers.{{i}}.self_attn.{part}_proj", f"blk.{{i}}.attn_{part}", "layers_{i}/attn/qkv"
    return (
        Weight(f"{hf}.weight", f"{gguf}.weight", f"{leaf}/kernel", f"{heads}H D", index, rotary),
        Weight(f"{hf}.bias", f"{gguf}.bias", f"{leaf}/bias", f"{heads}H", index, rotary, lambda c: c.qkv_bias),
    )


def linear(
    hf: str,
    gguf: str,
    leaf: str,
    shape: str,
    bias: Callable[[ModelConfig], bool],
    index: LeafIndex = WHOLE,
    layers: Callable[[LayerKind], bool] = lambda kind: True,
) -> tuple[Weight, Weight]:
    """A projection of every layer and its bias."""
    hf, gguf, leaf = f"model.layers.{{i}}.{hf}", f"blk.{{i}}.{gguf}", f"layers_{{i}}/{leaf}"
    out = shape.split()[0]
    return (
        Weight(f"{hf}.weight", f"{gguf}.weight", f"{leaf}/kernel", shape, index, layers=layers),
        Weight(f"{hf}.bias", f"{gguf}.bias", f"{leaf}/bias", out, index, when=bias, layers=layers),
    )


def mlp(hf: str = "mlp", names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> tuple[Weight, ...]:
    """The gated feed-forward of the layers that have no experts."""
    gate, up, down = (f"{hf}.{name}" for name in names)
    return (
        *linear(gate, "ffn_gate", "mlp/gate_up", "F D", lambda c: c.mlp_bias, GATE, lambda kind: not kind.moe),
        *linear(up, "ffn_up", "mlp/gate_up", "F D", lambda c: c.mlp_bias, UP, lambda kind: not kind.moe),
        *linear(down, "ffn_down", "mlp/down", "D F", lambda c: c.mlp_bias, WHOLE, lambda kind: not kind.moe),
    )


def experts(hf: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> tuple[Weight, ...]:
    """Router and experts of the layers that have some: a tensor each in safetensors, one for all in GGUF files."""
    leaf, places = "layers_{i}/mlp/", (("gate_up", GATE), ("gate_up", UP), ("down", WHOLE))
    lines = list(linear(f"{hf}.gate", "ffn_gate_inp", "mlp/router", "E D", _never, WHOLE, _has_experts))
    for name, gguf, (kernel, index) in zip(names, ("gate", "up", "down"), places, strict=True):
        shape = "D M" if kernel == "down" else "M D"
        part, axes = (WHOLE, (1, 0, 2)) if kernel == "down" else (index, ())
        tensors = (
            (f"model.layers.{{i}}.{hf}.experts.{{e}}.{name}.weight", "", shape, "E"),
            ("", f"blk.{{i}}.ffn_{gguf}_exps.weight", f"E {shape}", ""),
        )
        lines += [
            Weight(hf_name, gguf_name, f"{leaf}{kernel}/kernel", axis, part, axes=axes, each=each, layers=_has_experts)
            for hf_name, gguf_name, axis, each in tensors
        ]
    return tuple(lines)


def shared_expert(hf: str) -> tuple[Weight, ...]:
    """The expert that every token goes to, and its gate."""
    lines = (
        *linear(f"{hf}.gate_proj", "ffn_gate_shexp", "mlp/shared/gate_up", "S D", _never, GATE, _has_experts),
        *linear(f"{hf}.up_proj", "ffn_up_shexp", "mlp/shared/gate_up", "S D", _never, UP, _has_experts),
        *linear(f"{hf}.down_proj", "ffn_down_shexp", "mlp/shared/down", "D S", _never, WHOLE, _has_experts),
        *linear(f"{hf}_gate", "ffn_gate_inp_shexp", "mlp/shared_gate", "1 D", _never, WHOLE, _has_experts),
    )
    return tuple(replace(line, when=lambda c: c.shared_expert_intermediate_size > 0) for line in lines[::2])


def _has_experts(kind: LayerKind) -> bool:
    return kind.moe


def _never(config: ModelConfig) -> bool:
    return False


EMBEDDING = Weight("model.embed_tokens.weight", "token_embd.weight", "embed/embedding", "V D")
QKV = (
    *_qkv("q", QUERY, "N", rotary=True),
    *_qkv("k", KEY, "K", rotary=True),
    *_qkv("v", VALUE, "K", rotary=False),
)
OUT = linear("self_attn.o_proj", "attn_output", "attn/out", "D NH", lambda c: c.o_bias)
ATTENTION = (*QKV, *OUT)
PRE_NORMS = (
    *layer_norm("input_layernorm", "attn_norm", "attn_norm"),
    *layer_norm("post_attention_layernorm", "ffn_norm", "mlp_norm"),
)
SANDWICH_NORMS = (
    *layer_norm("input_layernorm", "attn_norm", "attn_norm"),
    *layer_norm("post_attention_layernorm", "post_attention_norm", "attn_post_norm"),
    *layer_norm("pre_feedforward_layernorm", "ffn_norm", "mlp_norm"),
    *layer_norm("post_feedforward_layernorm", "post_ffw_norm", "mlp_post_norm"),
)
MLP = mlp()
FINAL_NORM = norm("model.norm", "output_norm", "final_norm")
HEAD = Weight("lm_head.weight", "output.weight", "lm_head/kernel", "V D", when=lambda c: not c.tie_word_embeddings)
LLAMA_WEIGHTS = (EMBEDDING, *PRE_NORMS, *ATTENTION, *MLP, *FINAL_NORM, HEAD)
