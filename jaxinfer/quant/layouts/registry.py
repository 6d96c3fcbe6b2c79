"""Which layout reads which ``quant_method``."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.quant.layouts.awq import AWQLayout
from jaxinfer.quant.layouts.bitsandbytes import BitsAndBytesLayout
from jaxinfer.quant.layouts.compressed_tensors import CompressedTensorsLayout
from jaxinfer.quant.layouts.fp8_block import Fp8Layout
from jaxinfer.quant.layouts.gptq import GPTQLayout
from jaxinfer.quant.layouts.layout import Layout

LAYOUTS: Mapping[str, Callable[[Mapping[str, Any]], Layout]] = {
    "awq": AWQLayout.from_config,
    "gptq": GPTQLayout.from_config,
    "compressed-tensors": CompressedTensorsLayout.from_config,
    "bitsandbytes": BitsAndBytesLayout.from_config,
    "fp8": Fp8Layout.from_config,
}


def layout_of(config: Mapping[str, Any]) -> Layout:
    """The layout that a checkpoint's ``quantization_config`` describes.

    Raises:
        ValueError: an unknown method, or a setting that is not supported; by name.
    """
    method = config.get("quant_method")
    if method is None and any(config.get(f"load_in_{bits}bit") for bits in (4, 8)):
        method = "bitsandbytes"  # whose older checkpoints do not say so
    if not isinstance(method, str) or method not in LAYOUTS:
        raise ValueError(
            f"quantization_config has quant_method={method!r}, which is not supported: checkpoints are read in "
            f"{', '.join(LAYOUTS)}. Load the unquantised checkpoint and have it quantised while it is read "
            "(quantization='int4', for example), or a GGUF file"
        )
    return LAYOUTS[method](config)
