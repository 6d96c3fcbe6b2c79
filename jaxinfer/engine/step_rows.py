"""Step rows: what was chosen becomes the rows of a plan, and the requests' counters move as if the step were done."""

from collections.abc import Sequence

from jaxinfer.engine.chunk_draft import num_to_score
from jaxinfer.engine.draft import NO_DRAFT
from jaxinfer.engine.plan import ScheduledRow
from jaxinfer.engine.request import Request


def decode_rows(requests: Sequence[Request]) -> list[ScheduledRow]:
    """A row of one token and its draft for each request; every one draws at least a token."""
    rows = []
    for request in requests:
        start, draft = request.num_computed_tokens, request.draft
        count = 1 + len(draft.token_ids)
        rows.append(ScheduledRow(request, start, count, True, 0, request.num_inflight > 0, draft))
        request.num_computed_tokens = start + count
        request.num_inflight += 1
        request.draft = NO_DRAFT
    return rows


def chunk_rows(chunks: Sequence[tuple[Request, int]]) -> list[ScheduledRow]:
    """Rows for requests with their shares; those that reach the last known token draw the next."""
    rows = []
    for request, share in chunks:
        start = request.num_computed_tokens
        samples = start + share == request.num_tokens
        rows.append(ScheduledRow(request, start, share, samples, min(share, num_to_score(request))))
        request.num_computed_tokens = start + share
        request.num_inflight += samples
    return rows
