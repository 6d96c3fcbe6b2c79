"""What was measured on GPUs; `scripts/tune_kernels.py` rewrites this file. `config` chooses what is not here."""

from collections.abc import Mapping
from types import MappingProxyType

FORWARD: Mapping[tuple[str, int], tuple[int, int, int, int]] = MappingProxyType({})
"""By device kind and lanes, for 16-bit operands: the fields of the forward kernel's `Tiles`."""

DQ: Mapping[tuple[str, int], tuple[int, int, int, int]] = MappingProxyType({})
"""Likewise of the kernel for the queries' gradients."""

DKV: Mapping[tuple[str, int], tuple[int, int, int, int]] = MappingProxyType({})
"""Likewise of the kernel for the keys' and values' gradients."""
