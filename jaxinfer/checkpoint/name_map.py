"""From our parameter paths to those of somebody else's tree."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LAYER = re.compile(r"layers_(\d+)")


@dataclass(frozen=True)
class Sources:
    """What one of our parameters is made of.

    Args:
        paths: path of an array in the other tree, or several; keys joined with slashes, e.g. "params/block_0/q/kernel".
        transform: makes our array from those arrays (numpy, as they are stored), given in that order. None takes the
            only one as it is.

    Raises:
        ValueError: several paths without a transform.
    """

    paths: tuple[str, ...] | str
    transform: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        paths = (self.paths,) if isinstance(self.paths, str) else tuple(self.paths)
        object.__setattr__(self, "paths", paths)
        if not paths or not all(isinstance(path, str) for path in paths):
            raise ValueError(f"Sources paths={paths!r} must be one path or several")
        if len(paths) > 1 and self.transform is None:
            raise ValueError(f"Sources of {len(paths)} arrays ({', '.join(paths)}) needs a transform that joins them")


Source = str | Sources
NameMap = Mapping[str, Source] | Callable[[str], Source]


def resolve_names(name_map: NameMap, leaves: Iterable[str]) -> dict[str, Sources]:
    """What each leaf is made of.

    Args:
        name_map: leaf path -> source; either a function, or a mapping whose keys are paths, where "layers_{i}" stands
            for every layer and "{i}" in the source's paths for its number.
        leaves: our parameter paths.

    Raises:
        ValueError: a leaf has no source, or a key of the mapping fits no leaf.
        TypeError: a source is neither a path nor Sources.
    """
    leaves = list(leaves)
    if not isinstance(name_map, Mapping):
        return {leaf: _as_sources(leaf, name_map(leaf)) for leaf in leaves}
    found, used, missing = {}, set(), []
    for leaf in leaves:
        layer = LAYER.search(leaf)
        key = leaf if leaf in name_map or layer is None else LAYER.sub("layers_{i}", leaf, count=1)
        if key not in name_map:
            missing.append(leaf)
            continue
        used.add(key)
        found[leaf] = _as_sources(leaf, name_map[key], None if key == leaf or layer is None else int(layer[1]))
    unused = sorted(set(name_map) - used)
    if unused:
        raise ValueError(
            f"name_map has the key {unused[0]!r}, which is no parameter of this model; its parameters are "
            f"{', '.join(leaves[:4])}, ..."
        )
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise ValueError(f"name_map says nothing of the parameter {missing[0]!r}{more}")
    return found


def _as_sources(leaf: str, source: Any, layer: int | None = None) -> Sources:
    if isinstance(source, str):
        source = Sources(source)
    if not isinstance(source, Sources):
        raise TypeError(f"name_map gives {source!r} for {leaf!r}; it must be a path or jaxinfer.checkpoint.Sources")
    if layer is None:
        return source
    return Sources(tuple(path.replace("{i}", str(layer)) for path in source.paths), source.transform)
