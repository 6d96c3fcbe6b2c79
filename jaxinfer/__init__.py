"""jaxinfer: an LLM inference engine for JAX, with vLLM's names. A name loads what it needs when it is first used."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from jaxinfer._version import __version__

if TYPE_CHECKING:
    from jaxinfer.async_llm import AsyncLLM
    from jaxinfer.async_llm import AsyncLLM as AsyncLLMEngine
    from jaxinfer.checkpoint.quantize import quantize_checkpoint as quantize
    from jaxinfer.engine.beam_outputs import BeamSearchOutput, BeamSearchSequence
    from jaxinfer.engine.beam_search_params import BeamSearchParams
    from jaxinfer.engine.errors import EngineAsleepError, EngineDeadError
    from jaxinfer.engine.outputs import CompletionOutput, Logprob, RequestOutput
    from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
    from jaxinfer.llm import LLM
    from jaxinfer.models.config import ModelConfig
    from jaxinfer.serving.inputs import TextPrompt, TokensPrompt
    from jaxinfer.startup.args import AsyncEngineArgs, EngineArgs

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineArgs",
    "EngineAsleepError",
    "EngineDeadError",
    "Logprob",
    "ModelConfig",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "quantize",
]

_HOMES = {
    "LLM": "jaxinfer.llm:LLM",
    "AsyncEngineArgs": "jaxinfer.startup.args:AsyncEngineArgs",
    "AsyncLLM": "jaxinfer.async_llm:AsyncLLM",
    "AsyncLLMEngine": "jaxinfer.async_llm:AsyncLLM",
    "BeamSearchOutput": "jaxinfer.engine.beam_outputs:BeamSearchOutput",
    "BeamSearchParams": "jaxinfer.engine.beam_search_params:BeamSearchParams",
    "BeamSearchSequence": "jaxinfer.engine.beam_outputs:BeamSearchSequence",
    "CompletionOutput": "jaxinfer.engine.outputs:CompletionOutput",
    "EngineArgs": "jaxinfer.startup.args:EngineArgs",
    "EngineAsleepError": "jaxinfer.engine.errors:EngineAsleepError",
    "EngineDeadError": "jaxinfer.engine.errors:EngineDeadError",
    "Logprob": "jaxinfer.engine.outputs:Logprob",
    "ModelConfig": "jaxinfer.models.config:ModelConfig",
    "RequestOutput": "jaxinfer.engine.outputs:RequestOutput",
    "RequestOutputKind": "jaxinfer.engine.sampling_params:RequestOutputKind",
    "SamplingParams": "jaxinfer.engine.sampling_params:SamplingParams",
    "TextPrompt": "jaxinfer.serving.inputs:TextPrompt",
    "TokensPrompt": "jaxinfer.serving.inputs:TokensPrompt",
    "quantize": "jaxinfer.checkpoint.quantize:quantize_checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    module, attribute = _HOMES[name].split(":")
    value = getattr(import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
