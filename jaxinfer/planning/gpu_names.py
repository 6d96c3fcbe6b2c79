"""GPUs by the names that people write: "A100 80G", "4090 24G", "2x h200", "NVIDIA L40S". Never imports JAX."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from jaxinfer.planning.gpu_specs import GPU_SPECS, GPUSpec

# Card -> its sizes in GB as people say them -> its name in GPU_SPECS. The first is taken where no size is given.
_CARDS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "a100": {"80": "a100-80g", "40": "a100-40g"},
        "4090": {"24": "rtx4090"},
        "l4": {"24": "l4"},
        "l40s": {"48": "l40s"},
        "h100": {"80": "h100"},
        "h200": {"141": "h200"},
        "b200": {"180": "b200", "192": "b200"},
    }
)
_COUNT = re.compile(r"^(\d{1,3})(?: ?[x*] ?| (?!gi?b?\b))|(?<=[0-9gb]) ?[x*] ?(\d{1,3})$")
_SIZE = re.compile(r"\b(\d+) ?(?:g|gb|gib)\b")
_FILLING = re.compile(r"\b(nvidia|geforce|tesla|tensor|core|gpu|gpus|rtx|sxm\d?|pcie|nvl|hbm\d?e?|ada)\b")


@dataclass(frozen=True)
class NamedGPU:
    """What a name stands for.

    Attributes:
        name: in `GPU_SPECS`.
        spec: its numbers.
        count: how many of them the name says; None where it does not.
        guessed: the name left the memory open, and the card comes in several sizes.
    """

    name: str
    spec: GPUSpec
    count: int | None
    guessed: bool = False


def find_gpu(gpu: str) -> NamedGPU:
    """The GPU that is meant.

    Args:
        gpu: a name of `GPU_SPECS`, the driver's name, or a card with or without maker, form, memory and number. A100
            alone is the one with 80 GB.

    Raises:
        ValueError: an unknown card, or a size that the card does not come in.
        TypeError: no str.
    """
    if not isinstance(gpu, str):
        raise TypeError(f"gpu={gpu!r} must be the name of a GPU, such as 'A100 80G'")
    text = re.sub(r"[-_,/()]+", " ", gpu.lower()).strip()
    counted = _COUNT.search(text)
    count = int(counted[1] or counted[2]) if counted else None
    if count == 0:
        raise ValueError(f"gpu={gpu!r} must be at least one GPU")
    text = _COUNT.sub("", text)
    sizes = _SIZE.findall(text)
    text = _FILLING.sub(" ", re.sub(r"\brtx(?=\d)", "rtx ", _SIZE.sub(" ", text)))
    words = text.split()
    if not sizes and len(words) == 2 and words[1] in _CARDS.get(words[0], ()):
        sizes = [words.pop()]
    if len(words) != 1 or words[0] not in _CARDS or len(sizes) > 1:
        raise ValueError(f"gpu={gpu!r} is not a known GPU; use one of {', '.join(GPU_SPECS)}, or '4x h100' for several")
    offered = _CARDS[words[0]]
    size = sizes[0] if sizes else next(iter(offered))
    if size not in offered:
        raise ValueError(f"gpu={gpu!r}: there is no {words[0].upper()} of {size} GB; it has {' or '.join(offered)} GB")
    name = offered[size]
    return NamedGPU(name, GPU_SPECS[name], count, guessed=not sizes and len(set(offered.values())) > 1)
