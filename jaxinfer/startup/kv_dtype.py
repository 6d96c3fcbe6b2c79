"""kv_cache_dtype: the names it goes by."""

from typing import Any

from jaxinfer.config import KV_CACHE_DTYPES

_NAMES = {name: name for name in ("auto", *KV_CACHE_DTYPES)} | {
    "half": "float16",
    "float": "float32",
    "fp8": "fp8_e4m3",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
}


def named_kv_cache_dtype(value: Any) -> str:
    """ "auto", or one of `jaxinfer.config.KV_CACHE_DTYPES`.

    Args:
        value: vLLM's or JAX's name of it, or a dtype of JAX, numpy or torch.

    Raises:
        ValueError: there is no such cache; says which there are.
    """
    name = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    name = name.removeprefix("torch.")
    if name not in _NAMES:
        raise ValueError(
            f"kv_cache_dtype={value!r} is not supported; use 'auto' (the dtype of the activations), "
            f"{', '.join(repr(known) for known in KV_CACHE_DTYPES)} or 'fp8' (which is 'fp8_e4m3')"
        )
    return _NAMES[name]
