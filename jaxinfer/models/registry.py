"""From the architecture a checkpoint names to the family table that loads it."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.models.families.cohere import COHERE, COHERE2
from jaxinfer.models.families.family import Family
from jaxinfer.models.families.gemma import GEMMA
from jaxinfer.models.families.gemma2 import GEMMA2
from jaxinfer.models.families.gemma3 import GEMMA3
from jaxinfer.models.families.gpt2 import GPT2
from jaxinfer.models.families.gpt_neox import GPT_NEOX
from jaxinfer.models.families.granite import GRANITE
from jaxinfer.models.families.llama import LLAMA
from jaxinfer.models.families.mistral import MISTRAL
from jaxinfer.models.families.mixtral import MIXTRAL
from jaxinfer.models.families.olmo2 import OLMO2
from jaxinfer.models.families.phi3 import PHI3
from jaxinfer.models.families.qwen2 import QWEN2
from jaxinfer.models.families.qwen3 import QWEN3
from jaxinfer.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from jaxinfer.models.families.smollm3 import SMOLLM3
from jaxinfer.models.families.stablelm import STABLELM
from jaxinfer.models.families.wrapper import WRAPPERS

# fmt: off
FAMILIES: tuple[Family, ...] = (
    LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN2_MOE, QWEN3_MOE, GEMMA, GEMMA2, GEMMA3, PHI3, SMOLLM3, GRANITE, OLMO2,
    COHERE, COHERE2, STABLELM, GPT2, GPT_NEOX,
)
# fmt: on


def supported_architectures() -> tuple[str, ...]:
    """The names config.json's ``architectures`` may carry."""
    return (*(name for family in FAMILIES for name in family.architectures), *WRAPPERS)


def family_of_hf_config(config: Mapping[str, Any]) -> Family:
    """Finds the family of a Hugging Face config by ``architectures``, or by ``model_type`` when that is absent.

    A wrapper's config must have been through `text_config`.

    Raises:
        ValueError: no family loads it; the message lists the supported architectures.
    """
    names = config.get("architectures") or ()
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ValueError(f"architectures={names!r} must be a list of class names")
    for family in FAMILIES:
        if any(name in family.architectures for name in names):
            return family
        if not names and config.get("model_type") == family.name:
            return family
    given = f"architectures={list(names)}" if names else f"model_type={config.get('model_type')!r}"
    raise ValueError(f"{given} is not supported; supported architectures: {', '.join(supported_architectures())}")


def family_of_gguf(architecture: str, experts: bool = False) -> Family:
    """Finds the family of a GGUF file by its ``general.architecture``, and by whether it has experts: Mixtral's files
    are of the architecture "llama", too.

    Raises:
        ValueError: no family loads it; the message lists the supported architectures.
    """
    families = [family for family in FAMILIES if architecture in family.gguf_architectures]
    if families:
        return next((family for family in families if family.has_experts == experts), families[0])
    supported = ", ".join(dict.fromkeys(name for family in FAMILIES for name in family.gguf_architectures))
    raise ValueError(f"GGUF architecture {architecture!r} is not supported; supported architectures: {supported}")
