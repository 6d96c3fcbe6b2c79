"""Where a scale of a matrix's inputs can go: into what makes them, exactly. NumPy."""

from collections.abc import Mapping
from dataclasses import dataclass

import ml_dtypes  # noqa: F401  (names "bfloat16" for NumPy)
import numpy as np

from jaxinfer.calibration.matrix import kernels
from jaxinfer.models.config import LayerKind, ModelConfig

_ROUTING = ("mlp/router", "mlp/shared_gate")


@dataclass(frozen=True)
class Fold:
    """Matrices with the same inputs, and what makes these.

    Attributes:
        source: module whose parameters are divided; of "attn/qkv" the values, of "mlp/gate_up" the ups.
        consumers: modules of the quantised matrices.
        unquantised: modules that take the same inputs in floats.
    """

    source: str
    consumers: tuple[str, ...]
    unquantised: tuple[str, ...] = ()


def folds(config: ModelConfig, kind: LayerKind, params: Mapping[str, np.ndarray]) -> list[Fold]:
    """All there are in a layer.

    A norm is linear in its weight and bias. Attention is linear in the values, each of which goes to all query heads of
    its KV head: these inputs of the output projection share one scale. A gated MLP is linear in "up"; one without a
    gate is only where its activation is (relu, for scales above 0). Layers without norms before them take the residual
    stream, which nothing scales.
    """
    present = kernels(params)
    into_mlp = tuple(m for m in ("mlp/gate_up", "mlp/up", "mlp/shared/gate_up") if m in present)
    routing = tuple(m for m in _ROUTING if f"{m}/kernel" in params)
    found = []
    if config.pre_norms and config.block == "parallel_shared_norm":
        found.append(Fold("attn_norm", ("attn/qkv", *into_mlp), routing))
    elif config.pre_norms:
        found += [Fold("attn_norm", ("attn/qkv",)), Fold("mlp_norm", into_mlp, routing)]
    found.append(Fold("attn/qkv", ("attn/out",)))
    gated = config.mlp_gated or kind.moe
    if gated or config.hidden_act == "relu":
        found.append(Fold("mlp/gate_up" if gated else "mlp/up", ("mlp/down",)))
    if "mlp/shared/down" in present:
        found.append(Fold("mlp/shared/gate_up", ("mlp/shared/down",)))
    return found


def shared_magnitude(config: ModelConfig, source: str, magnitude: np.ndarray) -> np.ndarray:
    """Mean activations ``[E, K]``: of inputs that share a scale the mean of them all."""
    if source.endswith("norm"):  # of all experts
        return magnitude.mean(0, keepdims=True)
    if source != "attn/qkv":
        return magnitude
    heads = magnitude.reshape(config.num_key_value_heads, config.num_query_groups, config.head_dim)
    return np.broadcast_to(heads.mean(1, keepdims=True), heads.shape).reshape(magnitude.shape)


def foldable_scale(
    config: ModelConfig, source: str, params: Mapping[str, np.ndarray], scale: np.ndarray, dtype: str
) -> np.ndarray:
    """The scale ``[E, K]`` that dividing the source by `scale` really makes: a norm's weight is rounded to `dtype`."""
    if not source.endswith("norm"):
        return scale
    offset = np.float32(1 if config.norm_unit_offset else 0)
    before = params[f"{source}/scale"] + offset
    after = _divided_norm(params[f"{source}/scale"], scale[0], offset, dtype) + offset
    usable = (before != 0) & (after != 0)
    exact = np.divide(before, after, out=scale[0].copy(), where=usable)
    return exact[None]


def divide(config: ModelConfig, source: str, params: dict[str, np.ndarray], scale: np.ndarray, dtype: str) -> None:
    """Divides the source's own parameters by the scale ``[E, K]`` of its outputs; kernels are left to the caller."""
    bias = params.get(f"{source}/bias")
    if source.endswith("norm"):
        offset = np.float32(1 if config.norm_unit_offset else 0)
        params[f"{source}/scale"] = _divided_norm(params[f"{source}/scale"], scale[0], offset, dtype)
        if bias is not None:
            params[f"{source}/bias"] = bias / scale[0]
    elif bias is not None:
        params[f"{source}/bias"] = bias / output_scale(source, bias.shape, scale)


def output_scale(source: str, outputs: tuple[int, ...], scale: np.ndarray) -> np.ndarray:
    """What a matrix's outputs are divided by, in the parameter's output axes: 1 but for those that the scale ``[E, K]``
    belongs to."""
    if len(outputs) == 1:  # "mlp/up" of a plain MLP
        return scale[0]
    divisor = np.ones(outputs, np.float32)
    if source == "attn/qkv":
        divisor[:, -1] = scale.reshape(outputs[0], -1, outputs[2])[:, 0]
    else:
        divisor[1] = scale.reshape(outputs[1:])
    return divisor


def _divided_norm(weight: np.ndarray, scale: np.ndarray, offset: np.float32, dtype: str) -> np.ndarray:
    return ((weight + offset) / scale - offset).astype(dtype).astype(np.float32)
