"""Copying pages within a KV pool: copy-on-write of blocks that sequences share."""

from pallas_kernels.block_copy.api import block_copy
from pallas_kernels.block_copy.reference import block_copy_reference

__all__ = ["block_copy", "block_copy_reference"]
