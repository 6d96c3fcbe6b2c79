"""Throughput of an engine on a workload, with continuous or with static batches."""

import time
from collections.abc import Callable

from jaxinfer.bench.report import RequestTimes, ThroughputReport
from jaxinfer.bench.workload import Workload
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.replicas import AnyEngine
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.serving.inputs import TokenizedPrompt
from jaxinfer.serving.request_loop import RequestLoop


def measure_throughput(
    engine: AnyEngine,
    workload: Workload,
    *,
    static: bool = False,
    greedy: bool = False,
    detokenize: bool = True,
    on_finished: Callable[[RequestOutput], None] = lambda output: None,
) -> ThroughputReport:
    """Serves a workload, all of whose requests arrive at once, and ignores end-of-sequence ids.

    Args:
        engine: warmed up; KV waste is that of everything it has served, so it should have served nothing.
        static: serve batches of `max_num_seqs` requests; each waits for its longest member before the next one
            enters, and a request counts as answered when its whole batch is.
        greedy: temperature 0 instead of 1.
        detokenize: turn the output into text, as for a user.
        on_finished: called with each finished output.

    Raises:
        RuntimeError: a request failed.
        KeyboardInterrupt: on Ctrl-C, between two steps.
    """
    count = len(workload.prompts)
    size = engine.max_num_seqs if static else count
    before, times = engine.stats(), []
    begin = time.monotonic()
    with RequestLoop(engine) as loop:
        for first in range(0, count, size):
            for place in range(first, min(first + size, count)):
                params = _params(workload.output_lens[place], greedy, detokenize)
                loop.add(str(place), TokenizedPrompt(workload.prompts[place]), params, arrival_time=begin)
            finished = _serve(loop, on_finished)
            answered = max(one.finished for one in finished)
            times += [one.answered_at(answered) for one in finished] if static else finished
    return ThroughputReport.of(times, before, engine.stats(), seconds=time.monotonic() - begin, static=static)


def _params(output_len: int, greedy: bool, detokenize: bool) -> SamplingParams:
    return SamplingParams(
        temperature=0.0 if greedy else 1.0,
        max_tokens=output_len,
        ignore_eos=True,
        detokenize=detokenize,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _serve(loop: RequestLoop, on_finished: Callable[[RequestOutput], None]) -> list[RequestTimes]:
    times = []
    while len(loop):
        for output in loop.step():
            if output.error is not None:
                raise RuntimeError(f"request {output.request_id} failed: {output.error}")
            times.append(RequestTimes.of(output))
            on_finished(output)
    return times
