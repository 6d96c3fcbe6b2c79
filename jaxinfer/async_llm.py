"""AsyncLLM: serving requests that come and go on an event loop."""

import asyncio
import uuid
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jaxinfer.engine.beam_search_params import BeamSearchParams
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.engine.stats import EngineStats
from jaxinfer.models.config import ModelConfig
from jaxinfer.serving.engine_thread import AsyncRequest, EngineThread
from jaxinfer.serving.inputs import Message, Prompt, TokenizedPrompt, render_chat, require_tokenizer, tokenize_prompt
from jaxinfer.serving.profiling import start_profile, stop_profile
from jaxinfer.serving.request_stream import RequestStream
from jaxinfer.serving.scoring import ScoredSequence, scored_sequences
from jaxinfer.serving.stats_log import StatsLog
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.loading import load_engine
from jaxinfer.startup.unbuilt import without_unbuilt
from jaxinfer.startup.update_mode import UpdateMode, checked_mode
from jaxinfer.tokenizers.tokenizer import Tokenizer
from jaxinfer.typing import Params


class AsyncLLM:
    """A model that serves any number of concurrent requests, for use with asyncio.

    The engine runs in one background thread, which starts with the first request and ends with `shutdown()`, when the
    object is dropped, or with the interpreter. Requests may come from several event loops.

    Args:
        model, model_config, params, engine_args: as for `LLM`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        model_config: ModelConfig | None = None,
        params: Params | None = None,
        **engine_args: Any,
    ) -> None:
        args = EngineArgs(model, **engine_args)
        self._parts = load_engine(args, model_config, params)
        if self._parts.spans_processes:
            self._parts.close()
            raise ValueError(
                f"tensor_parallel_size={args.tensor_parallel_size}: an AsyncLLM does not span processes, which would "
                "have to take the same requests at the same step; use LLM with the same calls in each process"
            )
        self._thread = EngineThread(self._parts.engine, StatsLog(None if args.disable_log_stats else 10.0))
        self._stop = weakref.finalize(self, _close, self._thread, self._parts)

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, *, model_config: ModelConfig | None = None, params: Params | None = None
    ) -> "AsyncLLM":
        """The same from an `EngineArgs` or `AsyncEngineArgs`."""
        arguments = {item.name: getattr(engine_args, item.name) for item in fields(engine_args)}
        return cls(**arguments, model_config=model_config, params=params)

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        **unbuilt: Any,
    ) -> RequestStream:
        """Completes one prompt. Nothing happens before the result is iterated or awaited.

        `async for output in llm.generate(...)` yields outputs until `output.finished`: the text so far, or what is
        new under `SamplingParams(output_kind=RequestOutputKind.DELTA)`. A consumer that is slower than the engine gets
        fewer, larger ones. `await llm.generate(...)` returns the finished output.

        The request is aborted when its consumer is cancelled (`asyncio.wait_for` included), closes it or drops it.

        Args:
            prompt: a str, a list of token ids, `{"prompt": str}` or `{"prompt_token_ids": [...]}`.
            sampling_params: None takes `get_default_sampling_params()`; what is given is taken as it is.
            request_id: unique among unfinished requests; None makes one.
            priority: lower first, under `scheduling_policy="priority"`.
            unbuilt: vLLM's keywords for what is not built (`lora_request`, ...); anything but None is refused.

        Raises:
            ValueError: a keyword is refused; and at the first iteration: the request is refused, for being too long
                for instance.
            TypeError: likewise, for a wrong type.
            EngineDeadError: while iterating: a step failed, or the engine was shut down.
        """
        without_unbuilt(unbuilt)
        tokenizer = self._parts.tokenizer
        return self._stream(lambda: tokenize_prompt(prompt, tokenizer), sampling_params, request_id, priority)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
        **unbuilt: Any,
    ) -> RequestStream:
        """Answers one conversation; the arguments are those of `LLM.chat`, the result is that of `generate`."""
        without_unbuilt(unbuilt)
        options = dict(chat_template_kwargs or {})
        options |= {
            "chat_template": chat_template,
            "chat_template_content_format": chat_template_content_format,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        tokenizer = self._parts.tokenizer
        return self._stream(lambda: render_chat(messages, tokenizer, **options), sampling_params, request_id, priority)

    def beam_search(self, prompt: Prompt, params: BeamSearchParams, request_id: str | None = None) -> RequestStream:
        """Searches a prompt's most likely continuations; see `LLM.beam_search`.

        `await llm.beam_search(...)`, or the one output that `async for` yields, is a `RequestOutput` whose samples are
        the sequences, best first, with generated tokens and text only. Cancelling and refusals are those of
        `generate`.
        """
        tokenizer = self._parts.tokenizer

        def prepare() -> AsyncRequest:
            if not isinstance(params, BeamSearchParams):
                raise TypeError(f"params={params!r} must be BeamSearchParams")
            chosen = uuid.uuid4().hex if request_id is None else request_id
            return AsyncRequest(chosen, tokenize_prompt(prompt, tokenizer), params, priority=0)

        return RequestStream(self._thread, prepare, self)

    async def compute_logprobs(
        self, token_ids: Sequence[Any], *, start: int | Sequence[int] = 1, temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Log-probabilities of given tokens, computed beside other requests; see `LLM.compute_logprobs`."""

        async def one(sequence: ScoredSequence) -> np.ndarray:
            if sequence.is_empty:
                return sequence.logprobs(None)
            request = AsyncRequest(uuid.uuid4().hex, sequence.prompt, sequence.params, 0, sequence.scoring)
            return sequence.logprobs(await RequestStream(self._thread, lambda: request, self))

        return list(await asyncio.gather(*map(one, scored_sequences(token_ids, start, temperature))))

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; their streams yield a last output with finish_reason "abort". Unknown ids are fine."""
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await asyncio.wrap_future(self._thread.abort(ids))

    async def get_tokenizer(self) -> Tokenizer:
        """Raises ValueError when the engine has none."""
        return require_tokenizer(self._parts.tokenizer, "get_tokenizer()")

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used without `sampling_params`: the model's generation config over vLLM's defaults."""
        return self._parts.default_sampling_params()

    async def update_params(self, params: Params, mode: UpdateMode = "keep") -> None:
        """Swaps the model's parameters between two steps; see `LLM.update_params`.

        Args:
            params: tree of the same leaves, shapes and dtypes as before.
            mode: "keep": requests under way go on with the new ones, over the keys and values they have. "abort":
                they end with finish_reason "abort". "wait": they finish first, and those that come meanwhile wait
                and are served by the new parameters.

        Raises:
            ValueError: a leaf is missing, too many, or of another shape or dtype; or another mode; or mode="wait"
                while `pause_generation(mode="keep")` keeps requests from finishing. Nothing is changed.
        """
        aborts = checked_mode(mode) == "abort"
        if mode == "wait":
            await asyncio.wrap_future(self._thread.call_when_idle(lambda: self._parts.update_params(params)))
        else:
            await asyncio.wrap_future(self._thread.call_for_outputs(lambda: self._parts.update_params(params, aborts)))

    @property
    def weight_version(self) -> int:
        """How often `update_params` has changed the parameters: 0 for those that the engine began with."""
        return self._parts.engine.weight_version

    async def pause_generation(self, mode: UpdateMode = "abort", *, clear_cache: bool = True) -> None:
        """Stops serving, for an update of the parameters, say, until `resume_generation`. Requests that come meanwhile
        are taken and wait.

        Args:
            mode: "abort": requests under way end with finish_reason "abort". "wait": they finish first. "keep": they
                stop where they are and go on afterwards.
            clear_cache: empty the prefix cache. Requests that were stopped lose their keys and values as well, and
                compute them again when they go on, with what the parameters are then.

        Raises:
            ValueError: another mode; or mode="wait" while requests are stopped by mode="keep".
        """
        thread, engine, aborts = self._thread, self._parts.engine, checked_mode(mode) == "abort"
        await asyncio.wrap_future(thread.hold())
        if aborts:
            await asyncio.wrap_future(thread.call_for_outputs(engine.abort_all))
        elif mode == "wait":
            await asyncio.wrap_future(thread.call_when_idle(lambda: None))
        else:
            await asyncio.wrap_future(thread.freeze())
        if clear_cache:
            await asyncio.wrap_future(thread.call(lambda: engine.reset_prefix_cache(True)))

    async def resume_generation(self) -> None:
        """Ends `pause_generation`; nothing happens when nothing is paused."""
        await asyncio.wrap_future(self._thread.release())

    async def is_paused(self) -> bool:
        """Whether `pause_generation` was called and `resume_generation` was not."""
        return self._thread.is_held

    async def sleep(self, level: int = 1) -> None:
        """Gives device memory back; see `LLM.sleep`. Requests under way pause with what they have and go on after
        `wake_up`; new ones are refused with EngineAsleepError until then."""
        await asyncio.wrap_future(self._thread.call_for_outputs(lambda: self._parts.sleep.sleep(level)))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Ends `sleep`; see `LLM.wake_up`."""
        await asyncio.wrap_future(self._thread.call(lambda: self._parts.sleep.wake_up(tags)))

    async def release_kv_cache(self) -> None:
        """Gives the KV cache's device memory back and keeps the weights; requests pause as for `sleep`."""
        await asyncio.wrap_future(self._thread.call_for_outputs(lambda: self._parts.sleep.release_kv_cache()))

    async def restore_kv_cache(self) -> None:
        """Ends `release_kv_cache`; the cache starts empty."""
        await self.wake_up(["kv_cache"])

    async def is_sleeping(self) -> bool:
        """Whether weights or KV cache are missing."""
        return self._parts.sleep.is_sleeping

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empties the prefix cache; see `LLM.reset_prefix_cache`."""
        reset = self._parts.engine.reset_prefix_cache
        return await asyncio.wrap_future(self._thread.call(lambda: reset(reset_running_requests)))

    def stats(self) -> EngineStats:
        """Counts and times since the start."""
        return self._parts.engine.stats()

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine serves no more."""
        await asyncio.wrap_future(self._thread.call(self._parts.engine.check_alive))

    async def start_profile(self, trace_dir: str | Path | None = None) -> Path:
        """Begins a JAX trace; see `LLM.start_profile`."""
        return start_profile(trace_dir)

    async def stop_profile(self) -> None:
        """Ends the trace and writes it."""
        stop_profile()

    def shutdown(self) -> None:
        """Ends the engine after its current step and frees its memory; unfinished requests fail with
        EngineDeadError, as do later ones. May be called again."""
        self._stop()

    def __enter__(self) -> "AsyncLLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _stream(
        self,
        tokenize: Callable[[], TokenizedPrompt],
        sampling_params: SamplingParams | None,
        request_id: str | None,
        priority: int,
    ) -> RequestStream:
        def prepare() -> AsyncRequest:
            params = self.get_default_sampling_params() if sampling_params is None else sampling_params
            if not isinstance(params, SamplingParams):
                raise TypeError(f"sampling_params={params!r} must be SamplingParams, one for this prompt")
            chosen = uuid.uuid4().hex if request_id is None else request_id
            return AsyncRequest(chosen, tokenize(), params, priority)

        return RequestStream(self._thread, prepare, self)


def _close(thread: EngineThread, parts: Any) -> None:
    thread.stop()
    parts.close()
