"""The progress bar of generate()."""

from collections.abc import Callable
from typing import Any

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.progress_bar import ProgressBar


class RequestProgress:
    """Counts finished requests and shows tokens per second, prompt and output apart.

    Args:
        total: requests of the call.
        use_tqdm: False shows nothing; a callable replaces tqdm.
    """

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        make = ProgressBar if use_tqdm is True else use_tqdm
        self._bar = None
        if make:
            self._bar = make(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=self._rates(0, 0, 0))
        self._prompt_tokens = 0
        self._output_tokens = 0

    def finished(self, output: RequestOutput) -> None:
        """Takes one finished request."""
        if self._bar is None:
            return
        self._prompt_tokens += len(output.prompt_token_ids or ())
        self._output_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        seconds = getattr(self._bar, "format_dict", {}).get("elapsed", 0)
        self._bar.postfix = self._rates(self._prompt_tokens, self._output_tokens, seconds)
        self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    @staticmethod
    def _rates(prompt_tokens: int, output_tokens: int, seconds: float) -> str:
        seconds = seconds or float("inf")
        return f"input {prompt_tokens / seconds:.1f} tokens/s, output {output_tokens / seconds:.1f} tokens/s"
