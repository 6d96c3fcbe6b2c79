"""What was measured on GPUs; `scripts/tune_kernels.py` rewrites this file. `config` chooses what is not here."""

from collections.abc import Mapping
from types import MappingProxyType

TILES: Mapping[tuple[str, int, int, str], tuple[int, int, int, int, bool]] = MappingProxyType({})
"""By device kind, rows of a tile, head dim and dtype of the pages: the fields of a `TileConfig`."""

PIECES: Mapping[str, tuple[int, int]] = MappingProxyType({})
"""By device kind: pieces an SM that short tiles are cut into, and positions below which cutting is not worth it."""
