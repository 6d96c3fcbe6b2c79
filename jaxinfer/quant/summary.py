"""What a plan makes of a model's weights, in words and bytes."""

from typing import Any

import jax

from jaxinfer.quant.plan import QuantPlan, path_name


def summarise_plan(plan: QuantPlan, shapes: Any) -> dict[str, Any]:
    """The facts by name, all of JSON's types.

    Args:
        plan: which parameters are quantised, and how.
        shapes: the tree of the parameters in floats, with `jax.ShapeDtypeStruct` leaves.

    Returns:
        "method"; "bytes" and "bytes_in_floats" of all parameters; "formats": description -> number of parameters and
        their bytes. Where the method's format is turned into another one, the description names both.
    """
    formats: dict[str, dict[str, int]] = {}
    floats = 0
    for path, spec in jax.tree_util.tree_leaves_with_path(shapes):
        name = path_name(path)
        source, stored = plan.source(name, spec.shape), plan.stored(name, spec.shape)
        text = spec.dtype.name if source is None else str(source)
        if source != stored:
            text = f"{source}, kept as {stored}"
        found = formats.setdefault(text, {"parameters": 0, "bytes": 0})
        found["parameters"] += 1
        found["bytes"] += sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(plan.shape_of(name, spec)))
        floats += spec.size * spec.dtype.itemsize
    return {
        "method": plan.method,
        "bytes": sum(entry["bytes"] for entry in formats.values()),
        "bytes_in_floats": floats,
        "formats": formats,
    }


def format_lines(facts: dict[str, Any]) -> str:
    """ "N bytes of M in floats: 120 parameters int8 per output channel (...), 61 float32 (...)"."""
    parts = [f"{entry['parameters']} {text} ({entry['bytes']:,})" for text, entry in facts["formats"].items()]
    return f"{facts['bytes']:,} bytes ({facts['bytes_in_floats']:,} in floats): " + "; ".join(parts)
