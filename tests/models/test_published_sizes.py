"""The full-size models have as many parameters as their publishers say; nothing is allocated."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer.models.decoder import param_shapes
from jaxinfer.models.registry import family_of_hf_config

# Name -> architecture, the sizes in its config.json, and its number of parameters. Gemma-3-12B's is that of the text
# model; with the vision tower and its projector it has 12_187_325_040.
MODELS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent.parent / "data/published_sizes.json").read_text())


@pytest.mark.parametrize("name", MODELS)
def test_number_of_parameters(name: str) -> None:
    model = MODELS[name]
    config = {"architectures": [model["architecture"]], **model["config"]}
    leaves = jax.tree.leaves(param_shapes(family_of_hf_config(config).model_config(config), "bfloat16"))
    assert sum(int(np.prod(leaf.shape)) for leaf in leaves) == model["parameters"]
