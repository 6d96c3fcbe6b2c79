"""Checkpoints of compressed-tensors, which LLM Compressor writes: groups of modules, each with a format of its own.

Read are integers of 4 and 8 bits and float8, packed or plain (`compressed_scheme`). Where weights of 8 bits have a
scale an output and activations are rounded to the same type, they are rounded here, too, always with a scale for each
token; other rounding of activations, outputs and KV cache is left out, closer to the unquantised model. What differs
from the config is told in a warning.
https://github.com/vllm-project/compressed-tensors
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.layouts.compressed_config import Group, read_group
from jaxinfer.quant.layouts.compressed_scheme import ORDERING, Scheme
from jaxinfer.quant.layouts.fp8_block import KV_CACHE, STATIC_KV_CACHE
from jaxinfer.quant.layouts.layout import TensorSpec, keep
from jaxinfer.quant.storage import Storage

METHOD = "compressed-tensors"
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "transform_config": (None, {}),
    "moe_sparsity_config": (None,),
}


@dataclass(frozen=True)
class CompressedTensorsLayout:
    """See `jaxinfer.quant.layouts.layout.Layout`.

    Attributes:
        groups: of modules.
        ignored: names, or "re:" and a regular expression, of modules that are in floats all the same.
        found: what the checkpoint has of the module that this is the layout of.
    """

    groups: tuple[Group, ...]
    ignored: tuple[str, ...] = ("lm_head",)
    found: Mapping[str, TensorSpec] = field(default_factory=dict, compare=False, repr=False)
    method: str = field(default=METHOD, init=False)
    names: tuple[str, ...] = field(default=(METHOD,), init=False)
    ordering: str = field(default=ORDERING, init=False)
    unread: tuple[str, ...] = field(default=KV_CACHE, init=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "CompressedTensorsLayout":
        """See `Layout`. Warns of rounding that is left out."""
        keep(config, _ALLOWED, METHOD)
        sparsity = config.get("sparsity_config") or {}
        if not isinstance(sparsity, Mapping) or sparsity.get("format", "dense") != "dense":
            raise ValueError(
                f"quantization_config of {METHOD} has sparsity_config={sparsity!r}: sparse weights are not supported, "
                "only a mapping with format='dense' is; use the unquantised checkpoint, or one without sparsity"
            )
        said = config.get("config_groups")
        if said is not None and not isinstance(said, Mapping):
            raise ValueError(f"quantization_config of {METHOD} has config_groups={said!r}; it maps names to groups")
        notes = [STATIC_KV_CACHE] if config.get("kv_cache_scheme") else []
        read = [read_group(name, group, config.get("format"), notes) for name, group in (said or {}).items()]
        groups = tuple(group for group in read if group is not None)
        if not groups:
            raise ValueError(
                f"quantization_config of {METHOD} has config_groups={said!r}, none with weights. Take it out of the "
                "config, and the weights are read as the floats that they are"
            )
        if notes:
            told = "; ".join(dict.fromkeys(notes))
            warnings.warn(f"the checkpoint's {METHOD} config is not followed in all: {told}", stacklevel=2)
        return cls(groups, _patterns(config.get("ignore") or ()))

    @classmethod
    def for_modules(cls, storages: Mapping[str, Storage], ignored: Sequence[str]) -> "CompressedTensorsLayout":
        """The layout to write.

        Args:
            storages: the format of each quantised module, by its name: of int4, int8 and fp8.
            ignored: the names of the other linear layers.

        Raises:
            ValueError: a format that compressed-tensors does not have.
        """
        by_scheme: dict[Scheme, list[str]] = {}
        for module, storage in storages.items():
            by_scheme.setdefault(Scheme.of_storage(storage), []).append(module)
        if len(by_scheme) == 1:
            return cls((Group(next(iter(by_scheme)), ("Linear",)),), tuple(ignored))
        return cls(tuple(Group(scheme, tuple(modules)) for scheme, modules in by_scheme.items()), tuple(ignored))

    def config(self) -> dict[str, Any]:
        """See `Layout`."""
        formats = sorted({group.scheme.format for group in self.groups})
        return {
            "quant_method": METHOD,
            "format": formats[0] if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {f"group_{index}": group.config() for index, group in enumerate(self.groups)},
            "ignore": list(self.ignored),
        }

    def __str__(self) -> str:
        return f"{METHOD}, {'; '.join(dict.fromkeys(str(group.scheme) for group in self.groups))}"

    def covers(self, module: str) -> bool:
        """See `Layout`."""
        return self._group_of(module) is not None and not any(_matches(target, module) for target in self.ignored)

    def of(self, module: str, tensors: Mapping[str, TensorSpec]) -> "CompressedTensorsLayout":
        """See `Layout`: the one group that has the module."""
        group = self._group_of(module)
        return replace(self, groups=self.groups if group is None else (group,), found=dict(tensors))

    def shapes(self, channels: int, row: int) -> Mapping[str, TensorSpec]:
        """See `Layout`."""
        return self._scheme.shapes(channels, row, self.found)

    def storage(self, row: int, dtypes: Mapping[str, str]) -> Storage:
        """See `Layout`."""
        return self._scheme.storage(row, dtypes)

    def unpack(self, tensors: Mapping[str, np.ndarray], channels: int, row: int) -> QuantArray:
        """See `Layout`."""
        return self._scheme.unpack(tensors, channels, row)

    def pack(self, array: QuantArray) -> dict[str, np.ndarray]:
        """See `Layout`."""
        return self._scheme.pack(array)

    @property
    def _scheme(self) -> Scheme:
        return self.groups[0].scheme

    def _group_of(self, module: str) -> Group | None:
        """The group that names the module most closely: by its name, by a pattern, by its class."""
        for kind in (_is_name, _is_pattern, _is_class):
            for group in self.groups:
                if any(kind(target) and _matches(target, module) for target in group.targets):
                    return group
        return None


def _is_class(target: str) -> bool:
    return target == "Linear"


def _is_pattern(target: str) -> bool:
    return target.startswith("re:")


def _is_name(target: str) -> bool:
    return not _is_class(target) and not _is_pattern(target)


def _matches(target: str, module: str) -> bool:
    if _is_class(target):
        return not module.endswith("embed_tokens")
    return bool(re.match(target[3:], module)) if _is_pattern(target) else target == module


def _patterns(values: Any) -> tuple[str, ...]:
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"quantization_config of {METHOD} has ignore={values!r}, which must be a list of names")
    for value in filter(_is_pattern, values):
        try:
            re.compile(value[3:])
        except re.error as error:
            raise ValueError(
                f"quantization_config of {METHOD} has ignore with {value!r}, no regular expression ({error})"
            ) from error
    return tuple(values)
