"""Scoring windows of tokens through the engine, as `prompt_logprobs` does for users."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.memory import blocks_for
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.serving.inputs import TokenizedPrompt
from jaxinfer.serving.request_loop import RequestLoop
from jaxinfer.sharding.shards import shards_of
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.devices import placements
from jaxinfer.startup.sizing import engine_config
from jaxinfer.typing import Params

STEP_TOKENS = 512
"""Tokens of a step unless `max_num_batched_tokens` says otherwise; each needs its logits."""
SCORE = SamplingParams(
    temperature=0,
    max_tokens=1,
    prompt_logprobs=1,
    ignore_eos=True,
    detokenize=False,
    output_kind=RequestOutputKind.FINAL_ONLY,
)


@dataclass(frozen=True)
class Scores:
    """What a model said of every token that has one before it in its window.

    Attributes:
        logprobs: float64[S], of the tokens that are there.
        best_ids: int64[S], the most probable token in each place.
        tokens: that went through the model, those without a score included.
        seconds: that took, without compiling.
    """

    logprobs: np.ndarray
    best_ids: np.ndarray
    tokens: int
    seconds: float


class Scorer:
    """An engine made for scoring: one step size, one compiled program, a pool for a few windows.

    Args:
        args: the engine's settings; `kv_cache_dtype` is what is measured. How much runs at once and the pool's size are
            chosen here.
        model: the architecture.
        dtype: dtype name of parameters and activations.
        params: on the device.
        window: tokens of the longest window.

    Raises:
        ValueError: a setting is refused, by name.
    """

    def __init__(self, args: EngineArgs, model: ModelConfig, dtype: str, params: Params, window: int) -> None:
        step = args.max_num_batched_tokens or STEP_TOKENS
        # A window's last token also draws one, which is never asked for.
        longest = window + 1 if args.max_model_len is None else args.max_model_len
        self._at_once = -(-step // window) + 1
        num_blocks = (self._at_once + 1) * (blocks_for(longest, args.block_size) - 1)
        args = replace(
            args,
            max_num_seqs=step,
            max_num_batched_tokens=step,
            max_model_len=longest,
            num_gpu_blocks_override=num_blocks,
            max_logprobs=1,
            enforce_eager=True,
        )
        (placement,) = placements(1, args.tensor_parallel_size)
        shards = shards_of(model, placement, params, splits_experts=args.enable_expert_parallel)
        params = shards.put_tree(params)
        config = engine_config(args, model, dtype, loaded=params, shards=shards)
        self.config: EngineConfig = replace(config, scheduler=replace(config.scheduler, token_buckets=(step,)))
        self._runner = ModelRunner(self.config, params, shards.of(config.model))
        self._engine = Engine(self.config, self._runner, None)

    def score(
        self, windows: Sequence[list[int]], on_window: Callable[[RequestOutput], None] = lambda output: None
    ) -> Scores:
        """Scores windows of at least two tokens.

        Args:
            windows: token ids of the model.
            on_window: called with each finished window.

        Raises:
            RuntimeError: a window failed, with the reason.
            KeyboardInterrupt: on Ctrl-C, between two steps.
        """
        self._serve([windows[0][:2]], lambda output: None)  # compiles
        begin = time.monotonic()
        outputs = self._serve(windows, on_window)
        seconds = time.monotonic() - begin
        logprobs, best = [], []
        for output in outputs:
            assert output.prompt_token_ids is not None and output.prompt_logprobs is not None
            for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
                assert entry is not None
                logprobs.append(entry[token].logprob)
                best.append(next(candidate for candidate, found in entry.items() if found.rank == 1))
        return Scores(np.array(logprobs, np.float64), np.array(best, np.int64), sum(map(len, windows)), seconds)

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far."""
        return self._runner.num_compiled

    def close(self) -> None:
        """Frees the pool; the parameters stay the caller's."""
        self._runner.shutdown()

    def _serve(self, windows: Sequence[list[int]], on_window: Callable[[RequestOutput], None]) -> list[RequestOutput]:
        """A few windows at a time, so that none is preempted."""
        finished: dict[int, RequestOutput] = {}
        added = 0
        with RequestLoop(self._engine) as loop:
            while len(finished) < len(windows):
                while added < len(windows) and len(loop) < self._at_once:
                    loop.add(str(added), TokenizedPrompt(windows[added]), SCORE)
                    added += 1
                for output in loop.step():
                    if output.error is not None:
                        raise RuntimeError(f"window {output.request_id} failed: {output.error}")
                    finished[int(output.request_id)] = output
                    on_window(output)
        return [finished[index] for index in range(len(windows))]
