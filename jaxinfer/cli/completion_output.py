"""How `jaxinfer generate` shows completions: as text in blocks, or as JSON lines."""

import codecs
import json
import sys
from collections.abc import Sequence
from typing import Any, Protocol

from jaxinfer.engine.outputs import Logprob, RequestOutput, TokenLogprobs

TITLE_WIDTH = 60


class CompletionWriter(Protocol):
    """Takes the outputs of prompts, by index, as they come; a finished one ends its prompt."""

    def write(self, index: int, output: RequestOutput) -> None: ...

    def refuse(self, index: int, error: str) -> None:
        """The prompt is not served, or not to its end."""
        ...


def make_writer(prompts: Sequence[str], num_samples: int, *, as_json: bool, stream: bool) -> CompletionWriter:
    """The writer to standard output for these prompts with `num_samples` samples each."""
    return JsonWriter(prompts, stream) if as_json else BlockWriter(prompts, num_samples)


class BlockWriter:
    """Writes one completion after the other: that whose turn it is at once, the others when theirs comes."""

    def __init__(self, prompts: Sequence[str], num_samples: int) -> None:
        self._titles = []
        for place, prompt in enumerate(prompts, start=1):
            for sample in range(1, num_samples + 1):
                of_several = f", sample {sample}" if num_samples > 1 else ""
                self._titles.append(f"=== {place}{of_several}: {_shortened(prompt)}")
        self._num_samples = num_samples
        self._texts = ["" for _ in self._titles]
        self._is_complete = [False for _ in self._titles]
        self._turn = 0
        self._has_title = False

    def write(self, index: int, output: RequestOutput) -> None:
        for sample in output.outputs:
            place = index * self._num_samples + sample.index
            self._texts[place] += sample.text
            self._is_complete[place] = sample.finished()
        self._show()

    def refuse(self, index: int, error: str) -> None:
        print(f"jaxinfer: prompt {index + 1}: {error}", file=sys.stderr)
        for place in range(index * self._num_samples, (index + 1) * self._num_samples):
            self._is_complete[place] = True
        self._show()

    def _show(self) -> None:
        while self._turn < len(self._titles):
            self._show_current()
            if not self._is_complete[self._turn]:
                break
            sys.stdout.write("\n")
            self._turn += 1
            self._has_title = False
        sys.stdout.flush()

    def _show_current(self) -> None:
        if not self._has_title and len(self._titles) > 1:
            sys.stdout.write(f"{self._titles[self._turn]}\n")
        self._has_title = True
        sys.stdout.write(self._texts[self._turn])
        self._texts[self._turn] = ""


class JsonWriter:
    """Writes an object a line, as soon as there is one."""

    def __init__(self, prompts: Sequence[str], stream: bool) -> None:
        self._prompts = prompts
        self._stream = stream

    def write(self, index: int, output: RequestOutput) -> None:
        samples = [_sample(output, place) for place in range(len(output.outputs))]
        scores: dict[str, Any] = {}
        if output.prompt_logprobs is not None:
            scores = {"prompt_logprobs": [None if one is None else _logprobs(one) for one in output.prompt_logprobs]}
        if self._stream:
            for sample in samples:
                _print_json({"index": index, "sample": sample.pop("index"), **scores, **sample})
                scores = {}  # once, like every other piece
            return
        prompt = {"index": index, "prompt": self._prompts[index]}
        num_tokens = {"num_prompt_tokens": len(output.prompt_token_ids or ())}
        _print_json({**prompt, **num_tokens, **scores, "outputs": samples, "error": None})

    def refuse(self, index: int, error: str) -> None:
        _print_json({"index": index, "prompt": self._prompts[index], "outputs": [], "error": error})


def _sample(output: RequestOutput, place: int) -> dict[str, Any]:
    sample = output.outputs[place]
    values = {
        "index": sample.index,
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
    }
    if sample.logprobs is not None:
        values["cumulative_logprob"] = sample.cumulative_logprob
        values["logprobs"] = [_logprobs(one) for one in sample.logprobs]
    return values


def _logprobs(candidates: TokenLogprobs) -> list[dict[str, Any]]:
    return [_logprob(token_id, logprob) for token_id, logprob in candidates.items()]


def _logprob(token_id: int, logprob: Logprob) -> dict[str, Any]:
    return {
        "token_id": token_id,
        "token": logprob.decoded_token,
        "logprob": logprob.logprob,
        "rank": logprob.rank,
    }


def _print_json(values: dict[str, Any]) -> None:
    is_utf8 = codecs.lookup(sys.stdout.encoding).name == "utf-8"
    print(json.dumps(values, ensure_ascii=not is_utf8), flush=True)


def _shortened(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= TITLE_WIDTH else line[: TITLE_WIDTH - 3] + "..."
