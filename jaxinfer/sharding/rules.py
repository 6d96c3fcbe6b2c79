"""The one table of what is split: a logical axis' name -> whether devices have parts of it."""

from collections.abc import Mapping

SPLIT: Mapping[str, bool] = {
    "vocab": True,
    "kv_heads": True,
    "ffn": True,
    "experts": False,
    "expert_ffn": True,
    "embed": False,
    "group": False,
    "qkv": False,
    "head_dim": False,
    "pair": False,
    "routes": False,
}
"""Of the logical axes of parameters. Under expert parallelism "experts" and "expert_ffn" change places."""

AXES: Mapping[str, tuple[str, ...]] = {
    "embed/embedding": ("vocab", "embed"),
    "lm_head/kernel": ("vocab", "embed"),
    "attn/qkv/kernel": ("kv_heads", "qkv", "head_dim", "embed"),
    "attn/qkv/bias": ("kv_heads", "qkv", "head_dim"),
    "attn/q_norm/scale": ("kv_heads", "group", "head_dim"),
    "attn/k_norm/scale": ("kv_heads", "head_dim"),
    "attn/out/kernel": ("embed", "kv_heads", "group", "head_dim"),
    "mlp/gate_up/kernel": ("pair", "ffn", "embed"),
    "mlp/gate_up/bias": ("pair", "ffn"),
    "mlp/up/kernel": ("ffn", "embed"),
    "mlp/up/bias": ("ffn",),
    "mlp/down/kernel": ("embed", "ffn"),
    "mlp/shared/gate_up/kernel": ("pair", "ffn", "embed"),
    "mlp/shared/gate_up/bias": ("pair", "ffn"),
    "mlp/shared/up/kernel": ("ffn", "embed"),
    "mlp/shared/up/bias": ("ffn",),
    "mlp/shared/down/kernel": ("embed", "ffn"),
}
"""End of a parameter's path -> its axes. What is not named here lies whole on every device."""

EXPERT_AXES: Mapping[str, tuple[str, ...]] = {
    "mlp/gate_up/kernel": ("pair", "experts", "expert_ffn", "embed"),
    "mlp/down/kernel": ("embed", "experts", "expert_ffn"),
}
"""The same of a layer with experts, whose parameters have an axis more."""


def axes_of(path: str, ndim: int) -> tuple[str, ...]:
    """Logical axes of a parameter of `ndim` axes, "" for those that have no name.

    Args:
        path: such as "layers_0/attn/qkv/kernel".
        ndim: number of its axes.
    """
    for table in (EXPERT_AXES, AXES):
        for ending, axes in table.items():
            if len(axes) == ndim and (path == ending or path.endswith("/" + ending)):
                return axes
    return ("",) * ndim


def split_axis(axes: tuple[str, ...], splits_experts: bool) -> int | None:
    """Index of the axis that is split; None for none.

    Args:
        axes: of `axes_of`.
        splits_experts: see `ModelSplit`.
    """
    rules = dict(SPLIT)
    if splits_experts:
        rules["experts"], rules["expert_ffn"] = rules["expert_ffn"], rules["experts"]
    return next((index for index, name in enumerate(axes) if rules.get(name, False)), None)
