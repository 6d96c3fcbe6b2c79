"""Flash attention over contiguous queries, keys and values, forward and backward."""

from pallas_kernels.flash_attention.api import flash_attention
from pallas_kernels.flash_attention.flash_attn_func import flash_attn_func

__all__ = ["flash_attention", "flash_attn_func"]
