"""What the device can do with a KV cache, as the kernels say it."""

from jaxinfer.cache.paged import kv_cache_shapes
from jaxinfer.config import EngineConfig
from pallas_kernels.dispatch import current_device
from pallas_kernels.kv_write.triton import check_kv_write, rope_spans

E4M3_CAPABILITY = (8, 9)


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
    """Why the current GPU's kernel cannot write this engine's pool, which XLA then does in more launches; None if it
    can, and where there are no kernels."""
    device, cache = current_device(), config.cache
    if device.platform != "gpu":
        return None
    model = config.model
    # Learned positions are a rotation of one pair of channels, by nothing.
    rotated = 2 if model.learned_positions else model.rotary_width
    for layer in kv_cache_shapes(model, cache.num_blocks, cache.block_size, config.kv_dtype).layers:
        half = (model.head_dim if layer.is_spread else rotated) // 2
        try:
            check_kv_write(layer.pages, layer.scales, rope_spans(model.head_dim, half), device)
        except NotImplementedError as error:
            return str(error)
    return None
