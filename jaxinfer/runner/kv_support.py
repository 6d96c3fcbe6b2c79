"""What the device can do with a KV cache, as the kernels say it."""

import math

from jaxinfer.cache.paged import kv_cache_shapes
from jaxinfer.config import EngineConfig
from pallas_kernels.dispatch import current_device
from pallas_kernels.triton_call import check_addressable

E4M3_CAPABILITY = (8, 9)
MOST_CODES = 1 << 31
"""Bytes of codes in a layer up to which the kernels address all of them."""


def require_kv_dtype(dtype: str) -> None:
    """Refuses a cache dtype that the current device has no instructions for; plain XLA has them all.

    Args:
        dtype: one of `jaxinfer.config.KV_CACHE_DTYPES`.

    Raises:
        ValueError: it is named, and so are those that can take its place.
    """
    device = current_device()
    capability = device.compute_capability
    if dtype == "fp8_e4m3" and capability is not None and capability < E4M3_CAPABILITY:
        raise ValueError(
            f"kv_cache_dtype='fp8_e4m3' ('fp8') needs a GPU of compute capability 8.9, and {device.kind} has "
            f"{capability[0]}.{capability[1]}; use 'int8', which is as small and more precise, 'fp8_e5m2' or 'int4'"
        )


def slow_pool(config: EngineConfig) -> str | None:
    """Why the kernels of the current GPU cannot write and copy this engine's pool, which XLA then does in more
    launches, and in how many blocks they could; None if they can, and where there are no kernels."""
    if current_device().platform != "gpu":
        return None
    cache = config.cache
    for layer in kv_cache_shapes(config.model, cache.num_blocks, cache.block_size, config.kv_dtype):
        try:
            check_addressable(layer.pages)
        except NotImplementedError as error:
            most = MOST_CODES // math.prod(layer.pages.shape[1:]) - 1  # block 0 is for padding
            return f"{error}; up to num_gpu_blocks_override={most} the kernel does it"
    return None
