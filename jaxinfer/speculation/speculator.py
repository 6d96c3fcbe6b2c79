"""Speculator: the engine's `Speculation`, around a method."""

from collections.abc import Sequence

from jaxinfer.config import SpeculationConfig
from jaxinfer.engine.plan import DraftOutcome
from jaxinfer.engine.request import NO_DRAFT, Draft, Request
from jaxinfer.sampling.bias import num_under_one_bias
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
        """The method's drafts, cut where a request's bans and biases change amid them."""
        drafts = self.proposer.propose(rows)
        return [_cut(request, draft) for (request, _), draft in zip(rows, drafts, strict=True)]

    def observe(self, outcomes: Sequence[DraftOutcome]) -> None:
        """Hands on what became of the drafts."""
        if self._config.is_adaptive:
            for outcome in outcomes:
                self._lengths[outcome.request].learn(outcome.num_accepted, outcome.num_drafted)
        self.proposer.observe(outcomes)


def _cut(request: Request, draft: Draft) -> Draft:
    count = num_under_one_bias(request, draft.token_ids)
    if count == len(draft.token_ids):
        return draft
    return draft._replace(token_ids=draft.token_ids[:count]) if count > 0 else NO_DRAFT
