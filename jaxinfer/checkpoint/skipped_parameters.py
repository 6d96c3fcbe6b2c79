"""Which parameters stay in floats because modules that they are made of are to be skipped."""

import warnings
from collections import defaultdict
from collections.abc import Sequence

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.leaf_shapes import leaf_shapes
from jaxinfer.checkpoint.weight_map import expected_weights
from jaxinfer.models.config import ModelConfig
from jaxinfer.quant.layouts.skipped_modules import ALWAYS, is_skipped
from jaxinfer.quant.plan import input_axis


def skipped_parameters(patterns: Sequence[str], model: ModelConfig, checkpoint: Checkpoint | None) -> frozenset[str]:
    """Paths of the parameters with a module that a pattern names, as for `is_skipped`.

    Modules have Hugging Face's names, "model.layers.0.mlp.down_proj", also those of a GGUF file; where no table of
    names is known (live parameters, an Orbax folder), they are the parameters' own, "layers_0.mlp.down". One that
    several modules are fused in, as query, key and value are, stays in floats when one of them does. "lm_head" is the
    embedding where that is the head.

    Warns of patterns that name nothing, but for the heads and tables that transformers leaves alone anyway.
    """
    modules = _modules(model, checkpoint)
    named = {pattern: _named(pattern, modules) for pattern in patterns}
    idle = [pattern for pattern, paths in named.items() if not paths and pattern not in ALWAYS]
    if idle:
        known = next(iter(next(iter(modules.values()))))
        warnings.warn(f"skip_modules: {idle} name no module of the model; they are like {known!r}", stacklevel=3)
    return frozenset().union(*named.values())


def _modules(model: ModelConfig, checkpoint: Checkpoint | None) -> dict[str, set[str]]:
    """Parameter -> the modules in it."""
    found: dict[str, set[str]] = defaultdict(set)
    if checkpoint is None or checkpoint.family is None:
        for path, spec in leaf_shapes(model, "float32").items():
            if input_axis(path, spec.shape) is not None:
                found[path].add(path.rsplit("/", 1)[0].replace("/", "."))
    else:
        for name, weight, slot in expected_weights(checkpoint.family, model, "hf"):
            shape = weight.tensor_shape(model)
            if len(shape) > 1:
                found[slot.leaf].add(name.removesuffix(".weight"))
    if model.tie_word_embeddings:
        found["embed/embedding"].add("lm_head")
    return found


def _named(pattern: str, modules: dict[str, set[str]]) -> set[str]:
    return {path for path, names in modules.items() if any(is_skipped(name, (pattern,)) for name in names)}
