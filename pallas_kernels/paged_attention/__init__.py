"""Ragged paged attention: decode, prefill chunks and scoring in one operation."""

from pallas_kernels.paged_attention.api import make_work_list, paged_attention
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.work_list import WorkList
from pallas_kernels.paged_attention.xla import CHUNK

__all__ = ["CHUNK", "WorkList", "make_work_list", "paged_attention", "paged_attention_reference"]
