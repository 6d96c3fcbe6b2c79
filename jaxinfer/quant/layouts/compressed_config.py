"""One entry of compressed-tensors' ``config_groups``: read, refused by name, and written."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jaxinfer.quant.layouts.compressed_scheme import PACKED, Scheme
from jaxinfer.quant.layouts.fp8_block import STATIC_ACTIVATIONS

_FORMATS = (PACKED, "int-quantized", "float-quantized", "naive-quantized")
_WEIGHTS = {
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "dynamic",
    "actorder",
    "scale_dtype",
    "zp_dtype",
    "observer",
    "observer_kwargs",
}
_REMEDY = "Use the unquantised checkpoint and have it quantised while it is read (quantization='int4', for example)"
_TOKENS: Mapping[str, Any] = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class Group:
    """Modules with weights of one kind.

    Attributes:
        scheme: that kind.
        targets: names of modules, "re:" and a regular expression, or "Linear".
    """

    scheme: Scheme
    targets: tuple[str, ...]

    def config(self) -> dict[str, Any]:
        """The entry of ``config_groups``."""
        scheme = self.scheme
        weights: dict[str, Any] = {
            "num_bits": scheme.bits,
            "type": scheme.kind,
            "symmetric": scheme.symmetric,
            "strategy": scheme.strategy,
            "dynamic": False,
        }
        if scheme.strategy == "group":
            weights["group_size"] = scheme.block[1]
        if scheme.strategy == "block":
            weights["block_structure"] = list(scheme.block)
        return {
            "targets": list(self.targets),
            "weights": weights,
            "input_activations": {**_TOKENS, "type": scheme.kind} if scheme.act_bits == 8 else None,
            "output_activations": None,
            "format": scheme.format,
        }


def read_group(name: str, said: Any, format_of_all: Any, notes: list[str]) -> Group | None:
    """One entry.

    Args:
        name: its key.
        said: its value.
        format_of_all: the config's ``format``, for a group that has none.
        notes: where activations are rounded in another way than the checkpoint says, or not at all, it is added here.

    Returns:
        None for a group that quantises no weights.

    Raises:
        ValueError: it is not supported; names the keys.
    """
    if not isinstance(said, Mapping):
        raise _refusal(name, repr(said), "a mapping with targets and weights")
    targets = said.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise _refusal(name, f"targets={targets!r}", "a list of names")
    for target in targets:
        _check_target(name, target)
    if said.get("output_activations"):
        notes.append("outputs stay in 16 bits")
    weights = said.get("weights")
    if weights is None:
        return None
    stored = said.get("format") or format_of_all
    if stored not in _FORMATS:
        raise _refusal(name, f"format={stored!r}", ", ".join(_FORMATS))
    scheme = _read_weights(name, weights, str(stored))
    return Group(_with_activations(name, scheme, said.get("input_activations"), notes), tuple(targets))


def _check_target(name: str, target: str) -> None:
    if target.startswith("re:"):
        try:
            re.compile(target[3:])
        except re.error as error:
            raise _refusal(name, f"targets with {target!r}", f"a regular expression ({error})") from error
    elif target != "Linear" and target[:1].isupper():
        raise _refusal(name, f"targets with {target!r}", "'Linear', a module's name, or 're:' and an expression")


def _read_weights(name: str, said: Any, stored: str) -> Scheme:
    if not isinstance(said, Mapping):
        raise _refusal(name, f"weights={said!r}", "a mapping")
    unknown = sorted(set(said) - _WEIGHTS)
    if unknown:
        raise _refusal(name, f"weights with {', '.join(unknown)}", ", ".join(sorted(_WEIGHTS)))
    kind, bits = said.get("type", "int"), said.get("num_bits", 8)
    if isinstance(bits, float) or (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        raise _refusal(name, f"weights of num_bits={bits!r} and type={kind!r}", "int of 4 or 8 bits, float of 8")
    if said.get("scale_dtype") not in (None, "torch.float32", "torch.float16", "torch.bfloat16"):
        raise _refusal(name, f"weights with scale_dtype={said['scale_dtype']!r}", "a float type of 16 or 32 bits")
    symmetric, packed = said.get("symmetric", True), stored == PACKED
    if type(symmetric) is not bool or (kind == "float" and (packed or not symmetric)):
        raise _refusal(name, f"weights with symmetric={symmetric!r}, {kind}, {stored}", "symmetric floats, not packed")
    if said.get("dynamic"):
        raise _refusal(name, f"weights with dynamic={said['dynamic']!r}", "false")
    group, block = said.get("group_size"), said.get("block_structure")
    strategy: Any = said.get("strategy") or ("tensor" if group is None else "channel" if group == -1 else "group")
    if strategy == "group":
        block = [1, group]
    elif strategy == "block":
        if isinstance(block, str) and re.fullmatch(r"\d+x\d+", block):
            block = [int(size) for size in block.split("x")]
    elif strategy in ("tensor", "channel") and not (packed and strategy == "tensor" and not symmetric):
        block = [1, 1]
    else:
        raise _refusal(name, f"weights with strategy={strategy!r}", "'tensor', 'channel', 'group' or 'block'")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise _refusal(name, f"weights with group_size={group!r}, block_structure={block!r}", "positive sizes")
    if strategy == "block" and packed:
        raise _refusal(name, "packed weights with strategy='block'", "'channel' or 'group'")
    return Scheme(kind, bits, packed, strategy, (block[0], block[1]), symmetric)


def _with_activations(name: str, scheme: Scheme, said: Any, notes: list[str]) -> Scheme:
    """The scheme, with activations rounded where the product can round them: each token to what its weights are."""
    if not said:
        return scheme
    bits, kind = (said.get("num_bits", 8), said.get("type", "int")) if isinstance(said, Mapping) else (None, None)
    if bits != 8 or kind not in ("int", "float"):
        raise _refusal(name, f"input_activations of num_bits={bits!r}, type={kind!r}", "none, int or float of 8 bits")
    by_output = scheme.bits == 8 and scheme.strategy in ("tensor", "channel") and scheme.symmetric
    if not by_output or kind != scheme.kind or not said.get("symmetric", True) or said.get("strategy") == "group":
        notes.append("activations stay in 16 bits")
        return scheme
    if not said.get("dynamic"):
        notes.append(STATIC_ACTIVATIONS)
    return replace(scheme, act_bits=8)


def _refusal(name: str, what: str, supported: str) -> ValueError:
    return ValueError(
        f"quantization_config of compressed-tensors is not supported: group {name!r} has {what} (supported: "
        f"{supported}). {_REMEDY}"
    )
