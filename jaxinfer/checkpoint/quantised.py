"""Reading a checkpoint's parameters as a plan stores them."""

from collections.abc import Callable, Iterator

import numpy as np

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.gguf_codes import read_codes
from jaxinfer.checkpoint.leaf_shapes import leaf_shapes
from jaxinfer.checkpoint.load import placements_by_leaf, read_leaves
from jaxinfer.checkpoint.packed_codes import read_packed
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.plan import QuantPlan


def read_quantised(
    checkpoint: Checkpoint,
    dtype: str,
    plan: QuantPlan,
    *,
    on_bytes: Callable[[int], object] = lambda count: None,
) -> Iterator[tuple[str, np.ndarray | QuantArray]]:
    """Reads the parameters one after the other and quantises those of the plan, from float32; codes that the
    checkpoint has are taken over.

    Args:
        checkpoint: an opened checkpoint.
        dtype: of the other parameters: "float32", "bfloat16" or "float16".
        plan: which are quantised, and how.
        on_bytes: told the stored bytes of each piece that has been read.

    Yields:
        Path of the parameter, and its values as they are stored, on the host.

    Raises:
        ValueError: as `read_leaves`, or a value to be quantised is not finite; names the parameter.
    """
    specs = leaf_shapes(checkpoint.model_config, dtype)
    rounded = [name for name, spec in specs.items() if plan.source(name, spec.shape) and name not in plan.kept]
    for name, values in read_leaves(checkpoint, dtype, wide=rounded, skipped=plan.kept, on_bytes=on_bytes):
        yield name, plan.apply(name, values, dtype)
    sources = placements_by_leaf(checkpoint)
    for name, storage in plan.kept.items():
        spec, placements = specs[name], sources[name]
        if checkpoint.layout is None:
            codes = read_codes(name, spec.shape, placements, dtype)
        else:
            codes = read_packed(name, spec, placements, storage, dtype)
        yield name, plan.apply(name, codes, dtype)
        on_bytes(sum(placement.nbytes for placement in placements))
