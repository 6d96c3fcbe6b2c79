"""What was measured on GPUs; `scripts/tune_kernels.py` rewrites this file. `config` chooses what is not here."""

from collections.abc import Mapping
from types import MappingProxyType

TILES: Mapping[tuple[str, int, int], tuple[int, int, int, int]] = MappingProxyType({})
"""By device kind, bits and rows of a tile: the fields of a `TileConfig`."""
