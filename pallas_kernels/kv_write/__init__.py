"""Writing new keys and values into the pages of a KV pool, with or without their rotary embedding."""

from pallas_kernels.kv_write.api import kv_write, rope_kv_write
from pallas_kernels.kv_write.reference import kv_write_reference, rope_kv_write_reference

__all__ = ["kv_write", "kv_write_reference", "rope_kv_write", "rope_kv_write_reference"]
