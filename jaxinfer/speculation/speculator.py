"""Speculator: the engine's `Speculation`, around a method."""

from collections.abc import Sequence

from jaxinfer.config import SpeculationConfig
from jaxinfer.engine.draft import Draft
from jaxinfer.engine.plan import DraftOutcome
from jaxinfer.engine.request import Request
from jaxinfer.sampling.bias import under_one_bias
from jaxinfer.speculation.draft_length import DraftLength
from jaxinfer.speculation.per_request import PerRequest
from jaxinfer.speculation.proposer import Proposer


class Speculator:
    """Asks a method for drafts of the right length.

    Args:
        config: how long drafts may be.
        proposer: the method.
    """

    def __init__(self, config: SpeculationConfig, proposer: Proposer) -> None:
        self.proposer = proposer
        self._config = config
        self._lengths = PerRequest(lambda request: DraftLength(config.num_tokens))

    @property
    def num_compiled(self) -> int:
        """The method's own programs."""
        return self.proposer.num_compiled

    def length(self, request: Request) -> int:
        """Tokens to guess for this request."""
        return self._lengths[request].tokens() if self._config.is_adaptive else self._config.num_tokens

    def propose(self, rows: Sequence[tuple[Request, int]]) -> list[Draft]:
        """The method's drafts without what is behind a change of a request's bans and biases or beyond its length."""
        drafts = self.proposer.propose(rows)
        return [_useful(request, draft) for (request, _), draft in zip(rows, drafts, strict=True)]

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Hands on what became of the drafts."""
        if self._config.is_adaptive:
            for outcome in outcomes:
                self._lengths[outcome.request].learn(outcome.num_accepted, outcome.draft.depth)
        self.proposer.observe(outcomes)


def _useful(request: Request, draft: Draft) -> Draft:
    depths, deepest = draft.depths(), request.max_total_tokens - request.num_known_tokens - 1
    return draft.only([index for index in under_one_bias(request, draft) if depths[index] <= deepest])
