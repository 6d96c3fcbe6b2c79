"""Writing new keys and values into the pages of a KV pool."""

from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.kv_write.reference import kv_write_reference

__all__ = ["kv_write", "kv_write_reference"]
