"""Request parameters: what a front door hands to the engine for one prompt."""

from dataclasses import replace
from typing import TypeAlias

from jaxinfer.engine.beam_search_params import BeamSearchParams
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams

RequestParams: TypeAlias = SamplingParams | BeamSearchParams


def final_only(params: RequestParams) -> RequestParams:
    """The same for a caller who wants the end only, which spares the engine the outputs before it. A beam search has
    no others."""
    if isinstance(params, BeamSearchParams):
        return params
    return replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def gives_deltas(params: RequestParams) -> bool:
    """Each output has only what is new."""
    return isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA


def num_samples(params: RequestParams) -> int:
    """Sequences in the finished output."""
    return params.n if isinstance(params, SamplingParams) else params.beam_width
