"""Stopping: does the newest token end its request?"""

from typing import NamedTuple

from jaxinfer.engine.request import Request


class Stop(NamedTuple):
    """Why a request ends.

    Attributes:
        reason: "stop" or "length".
        stop_reason: the id of `stop_token_ids` that ended it; None for an end-of-sequence id and for "length".
    """

    reason: str
    stop_reason: int | None = None


def check_stop(request: Request) -> Stop | None:
    """Whether the last committed token of `request` ends it; None (false) when it goes on. Changes nothing.

    An end-of-sequence or stop id ends it only when at least `min_tokens` tokens came before: exactly when the sampler
    no longer masks these ids. On the last token that `max_total_tokens` allows, an ending id still counts as "stop".
    """
    output = request.output_token_ids
    if not output:
        return None
    token_id = output[-1]
    if len(output) > request.params.min_tokens:
        if token_id in request.eos_token_ids:
            return Stop("stop")
        if token_id in request.params.stop_token_ids:
            return Stop("stop", token_id)
    if request.num_prompt_tokens + len(output) >= request.max_total_tokens:
        return Stop("length")
    return None
