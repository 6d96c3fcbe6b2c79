"""What fits where: memory formulas and recommendations that need neither JAX nor a device. Names load when used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.planning.formulas import (
        count_parameters,
        kv_cache_size,
        kv_token_size,
        model_weight_size,
        sequence_blocks,
        weight_size,
    )
    from jaxinfer.planning.gpu_names import find_gpu
    from jaxinfer.planning.gpu_specs import GPU_SPECS
    from jaxinfer.planning.presets import PRESETS
    from jaxinfer.planning.recommend import recommend_config
    from jaxinfer.planning.recommendation import Recommendation

__all__ = [
    "GPU_SPECS",
    "PRESETS",
    "Recommendation",
    "count_parameters",
    "find_gpu",
    "kv_cache_size",
    "kv_token_size",
    "model_weight_size",
    "recommend_config",
    "sequence_blocks",
    "weight_size",
]

_HOMES = {
    "GPU_SPECS": "gpu_specs",
    "PRESETS": "presets",
    "Recommendation": "recommendation",
    "find_gpu": "gpu_names",
    "recommend_config": "recommend",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'jaxinfer.planning' has no attribute {name!r}")
    value = getattr(import_module(f"jaxinfer.planning.{_HOMES.get(name, 'formulas')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
