"""LLM: generating text for many prompts at once, from a script."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jaxinfer.engine.beam_outputs import BeamSearchOutput, beam_search_output
from jaxinfer.engine.beam_search_params import BeamSearchParams
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.engine.stats import EngineStats
from jaxinfer.models.config import ModelConfig
from jaxinfer.serving.batch_run import BatchRun
from jaxinfer.serving.inputs import (
    Message,
    Prompt,
    TokenizedPrompt,
    conversation_list,
    prompt_list,
    render_chat,
    require_tokenizer,
    tokenize_prompt,
)
from jaxinfer.serving.profiling import start_profile, stop_profile
from jaxinfer.serving.progress import RequestProgress
from jaxinfer.serving.scoring import score, scored_sequences
from jaxinfer.serving.stats_log import StatsLog
from jaxinfer.serving.step_gate import StepGate
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.loading import load_engine
from jaxinfer.startup.unbuilt import without_unbuilt
from jaxinfer.startup.update_mode import UpdateMode, checked_mode
from jaxinfer.tokenizers.tokenizer import Tokenizer
from jaxinfer.typing import Params


class LLM:
    """A model ready to generate, from a checkpoint or from live parameters.

    Deleting it, or `shutdown()`, frees its memory. Calls from several threads are served one after the other. A model
    may be split over the devices of several processes (`jax.distributed`): each makes the same calls and gets all
    outputs.

    Args:
        model: see `EngineArgs`, which has all further keywords (`dtype`, `max_model_len`, `max_num_seqs`, ...).
        model_config: architecture of `params`; only with them.
        params: a parameter tree in place of a checkpoint; arrays on the device are used without a copy.
            Without `tokenizer` and without `model`, prompts have to be token ids and outputs have no text; with
            `model`, its tokenizer and generation config are used but not its weights.
        engine_args: keywords of `EngineArgs`.

    Raises:
        ValueError: an argument, the checkpoint or the parameters do not fit; says which and what to do.
        TypeError: an argument of the wrong type, or an unknown one.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        model_config: ModelConfig | None = None,
        params: Params | None = None,
        **engine_args: Any,
    ) -> None:
        args = EngineArgs(model, **{"disable_log_stats": True} | engine_args)
        self._parts = load_engine(args, model_config, params)
        self._log = StatsLog(None if args.disable_log_stats else 10.0)
        self._counter = itertools.count()
        self._lock = StepGate()
        self._run: BatchRun | None = None

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, *, model_config: ModelConfig | None = None, params: Params | None = None
    ) -> "LLM":
        """The same from an `EngineArgs`."""
        arguments = {item.name: getattr(engine_args, item.name) for item in fields(engine_args)}
        return cls(**arguments, model_config=model_config, params=params)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: Sequence[int] | None = None,
        **unbuilt: Any,
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
            prompts: a str, a non-empty list of token ids, `{"prompt": str}`, `{"prompt_token_ids": [...]}`, or a list
                of those. An empty list is a call without prompts.
            sampling_params: for all prompts, or one for each. None takes `get_default_sampling_params()`; what is
                given is taken as it is, nothing is filled in from the model's generation config.
            use_tqdm: show a progress bar; a callable makes another kind of bar.
            priority: one for each prompt, lower first, under `scheduling_policy="priority"`.
            unbuilt: vLLM's keywords for what is not built (`lora_request`, ...); anything but None is refused.

        Returns:
            One finished output for each prompt, in their order. A prompt of several that cannot be served (empty, too
            long, asking for what this model has not) comes back with `error` set and finish_reason "error", and so
            does a request whose computation failed; a warning says how many.

        Raises:
            ValueError: no prompt can be served, or lengths do not match.
            TypeError: a prompt or a parameter of the wrong type; nothing is generated.
            EngineDeadError: a step failed earlier, or `shutdown()` was called.
            KeyboardInterrupt: on Ctrl-C, between two steps; the requests are dropped and the engine stays usable.
        """
        without_unbuilt(unbuilt)
        items = [tokenize_prompt(prompt, self._parts.tokenizer) for prompt in prompt_list(prompts)]
        return self._serve(items, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Message] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        priority: Sequence[int] | None = None,
        **unbuilt: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several; otherwise like `generate`.

        Args:
            messages: `[{"role": ..., "content": ...}, ...]`, or a list of such lists.
            chat_template: Jinja template in place of the model's, or the name of one of the model's.
            chat_template_content_format: "string" joins the text parts of a message, "openai" gives the template lists
                of parts; "auto" does what the template reads.
            add_generation_prompt: end the prompt with the header of the assistant's answer.
            continue_final_message: continue the last message instead; needs `add_generation_prompt=False`.
            tools: descriptions of functions, for templates that show them.
            chat_template_kwargs: further variables of the template.

        Raises:
            ValueError: also when the template refuses the messages, or there is none.
        """
        without_unbuilt(unbuilt)
        options = dict(chat_template_kwargs or {})
        options |= {
            "chat_template": chat_template,
            "chat_template_content_format": chat_template_content_format,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
        }
        items = [render_chat(item, self._parts.tokenizer, **options) for item in conversation_list(messages)]
        return self._serve(items, sampling_params, use_tqdm, priority)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool | Callable[..., Any] = False,
        **unbuilt: Any,
    ) -> list[BeamSearchOutput]:
        """Searches each prompt's most likely continuations, `params.beam_width` at a time.

        The rule is that of transformers' `generate(num_beams=..., early_stopping=False)`; see
        `jaxinfer.engine.beam_search.BeamSearch`. All prompts' beams run together, and those of a prompt share the keys
        and values of what they have in common. No penalty, bias or custom processor applies: sequences are scored by
        the model's own log-probabilities.

        Args:
            prompts: as for `generate`.
            params: for all of them.
            use_tqdm: show a progress bar; a callable makes another kind of bar.
            unbuilt: vLLM's further keywords (`lora_request`, `concurrency_limit`); anything but None is refused.

        Returns:
            One result for each prompt, in their order. A prompt of several that cannot be served has `error` set.

        Raises:
            ValueError, TypeError, EngineDeadError, KeyboardInterrupt: as `generate`.
        """
        without_unbuilt(unbuilt)
        if not isinstance(params, BeamSearchParams):
            raise TypeError(f"params={params!r} must be BeamSearchParams")
        items = [tokenize_prompt(prompt, self._parts.tokenizer) for prompt in prompt_list(prompts)]
        outputs = self._serve(items, params, use_tqdm, None)
        return [beam_search_output(output, self._parts.tokenizer) for output in outputs]

    def compute_logprobs(
        self, token_ids: Sequence[Any], *, start: int | Sequence[int] = 1, temperature: float = 1.0
    ) -> list[np.ndarray]:
        """Natural log-probability of each token given those before it, by the same forward pass that generates.

        Args:
            token_ids: sequences of ids, as lists or arrays, each at most `max_model_len` long.
            start: index of the first token that is scored, at least 1; one for all sequences, or one for each (the
                lengths of their prompts, say).
            temperature: the logits are divided by it, as when tokens are drawn with it.

        Returns:
            float32[length - start] for each sequence: entry i is the log-probability of ``token_ids[start + i]``.

        Raises:
            ValueError: an empty sequence, an id outside the vocabulary, or a value out of range.
            TypeError: something has the wrong type.
        """
        sequences = scored_sequences(token_ids, start, temperature)
        with self._lock:
            self._parts.check_same_calls("sequences", *sequences)
            return score(self._parts.engine, sequences, self._counter)

    def get_tokenizer(self) -> Tokenizer:
        """Raises ValueError when the engine has none."""
        return require_tokenizer(self._parts.tokenizer, "get_tokenizer()")

    def get_default_sampling_params(self) -> SamplingParams:
        """What is used without `sampling_params`: the model's generation config over vLLM's defaults."""
        return self._parts.default_sampling_params()

    def update_params(self, params: Params, mode: UpdateMode = "keep") -> None:
        """Swaps the model's parameters between two steps; the next one uses the new ones, and `weight_version` goes up
        by 1. Arrays on the engine's device in the engine's dtype are used as they are, without a copy, and no program
        is compiled again. The prefix cache is emptied.

        Args:
            params: tree of the same leaves, shapes and dtypes as before. Where the engine quantises, floats are
                quantised as the first ones were, leaf by leaf on the host, which takes as long as it did then.
            mode: what becomes of requests that another thread has running meanwhile. "keep": they go on with the new
                parameters, over the keys and values that the old ones made; their outputs tell which tokens were made
                by which (`CompletionOutput.weight_versions`). "abort": they end with finish_reason "abort" and what
                they have. "wait": they finish first.

        Raises:
            ValueError: a leaf is missing, too many, or of another shape or dtype, by its name; another mode; or
                mode="wait" from within a call that runs the requests. Nothing is changed.
        """
        if checked_mode(mode) == "wait":
            with self._lock:
                if self._parts.engine.has_unfinished_requests():
                    raise ValueError("mode='wait' from within generate() would wait for itself; use 'keep' or 'abort'")
                self._parts.update_params(params)
        else:
            self._lock.between_steps(lambda: self._update(params, mode == "abort"))

    def _update(self, params: Params, aborts: bool) -> None:
        outputs = self._parts.update_params(params, aborts)
        if self._run is not None:
            self._run.take(outputs)

    @property
    def weight_version(self) -> int:
        """How often `update_params` has changed the parameters: 0 for those that the engine began with."""
        return self._parts.engine.weight_version

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empties the prefix cache (`update_params` does so by itself).

        Args:
            reset_running_requests: also while requests run, which then compute all their tokens again; their outputs
                stay what they are.

        Returns:
            Whether it is empty now. While requests run that hold blocks of it nothing is changed, as in vLLM.
        """
        with self._lock:
            return self._parts.engine.reset_prefix_cache(reset_running_requests)

    def sleep(self, level: int = 1) -> None:
        """Gives the engine's device memory back to the process, for a training step, say; `wake_up` takes it again
        and outputs are the same as if nothing had happened. No program is compiled again.

        The memory is JAX's to reuse in this process; to other processes it goes only under JAX's "platform" allocator.
        Calls that need the engine raise EngineAsleepError meanwhile.

        Args:
            level: 1 drops the KV cache and moves the weights to host memory; 2 drops the weights as well, and they
                are read from the checkpoint again, unless `update_params` has given others. Arrays that the caller
                holds too (`LLM(params=...)`) stay on the device until the caller lets go of them, and are used again
                without a copy if they are still there; to keep them shared, use `release_kv_cache()`.

        Raises:
            ValueError: another level.
        """
        with self._lock:
            self._parts.sleep.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Ends `sleep`.

        Args:
            tags: "weights" and "kv_cache": which of them to take back now; None for all. Between the two, for
                instance, new weights can be given with `update_params` (which brings weights back by itself) while
                the KV cache's memory is still free. The engine serves again when nothing is missing.

        Raises:
            ValueError: an unknown tag, no room on the device, or weights that level 2 dropped and that no checkpoint
                has; what was there before stays.
        """
        with self._lock:
            self._parts.sleep.wake_up(tags)

    def release_kv_cache(self) -> None:
        """Gives the KV cache's device memory back and keeps the weights: `sleep` for a caller who trains them."""
        with self._lock:
            self._parts.sleep.release_kv_cache()

    def restore_kv_cache(self) -> None:
        """Ends `release_kv_cache`; the cache starts empty.

        Raises:
            ValueError: no room on the device.
        """
        self.wake_up(["kv_cache"])

    def is_sleeping(self) -> bool:
        """Whether weights or KV cache are missing."""
        return self._parts.sleep.is_sleeping

    def stats(self) -> EngineStats:
        """Counts and times since the start."""
        return self._parts.engine.stats()

    def start_profile(self, trace_dir: str | Path | None = None) -> Path:
        """Begins a JAX trace of everything the process does, written to a new folder by `stop_profile()`.

        Returns:
            The folder, which TensorBoard and Perfetto read: `trace_dir`, or one in the cache folder.
        """
        return start_profile(trace_dir)

    def stop_profile(self) -> None:
        """Ends the trace and writes it."""
        stop_profile()

    def shutdown(self) -> None:
        """Frees the engine's memory now; later calls raise EngineDeadError."""
        with self._lock:
            self._parts.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _serve(
        self,
        items: Sequence[TokenizedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | BeamSearchParams | None,
        use_tqdm: bool | Callable[..., Any],
        priority: Sequence[int] | None,
    ) -> list[RequestOutput]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        with self._lock:
            self._parts.check_same_calls("requests", items, sampling_params, priority)
            run = self._run = BatchRun(self._parts.engine, self._log, self._counter, self._lock)
            progress = RequestProgress(len(items), use_tqdm)
            try:
                return run.serve(items, sampling_params, priority, progress)
            finally:
                self._run = None
                progress.close()
