"""The text of one request as it grows: incremental, cut at stop strings, with a prefix that is safe to stream."""

from collections.abc import Sequence

from jaxinfer.tokenizers.text_stream import open_stream
from jaxinfer.tokenizers.tokenizer import Tokenizer


class Detokenizer:
    """Turns output token ids into text, one at a time, in time independent of the text's length.

    Args:
        tokenizer: whose ids they are.
        prompt_token_ids: what the output follows; it decides whether the first token keeps its leading space.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: accepted for vLLM's sake; no supported tokenizer puts spaces there.
        stop: strings that end the text when they are completed; none may be empty.
        include_stop_str_in_output: the text ends after the stop string instead of before it.
        min_tokens: a stop string completed by one of the first `min_tokens` tokens is ordinary text.

    Raises:
        ValueError: a stop string is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        if "" in stop:
            raise ValueError(f"stop={list(stop)!r} has an empty string, which every text contains; remove it")
        self._stream = open_stream(tokenizer, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        self._stop = tuple(stop)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._window_chars = max(map(len, self._stop), default=1) - 1
        self._window = ""  # the last settled characters: where a stop string may have begun
        self._exempt = 0  # length of the text of the first min_tokens tokens
        self._num_tokens = 0
        self._length = 0  # of the settled text
        self._settled = ""
        self._fresh: list[str] = []  # settled too, not yet joined
        self._finished = False

    def append(self, token_id: int) -> str | None:
        """Adds a token; returns the stop string it completed, if any, after which nothing more may be added."""
        if self._finished:
            raise RuntimeError("the text has ended; no token can follow")
        self._num_tokens += 1
        new = self._stream.push(token_id)
        if new:
            self._fresh.append(new)
            self._length += len(new)
        return self._find_stop(new) if self._stop else None

    def _find_stop(self, new: str) -> str | None:
        settled = self._window + new
        text = settled + self._stream.whole_pending()
        base = self._length - len(settled)
        self._window = settled[-self._window_chars :] if self._window_chars else ""
        if self._num_tokens <= self._min_tokens:
            self._exempt = base + len(text)
            return None
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            # The first occurrence to be complete wins, of those the longest.
            start = text.find(stop, max(0, self._exempt - base - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is None:
            return None
        end, start, stop = best
        self._cut(base + (end if self._include_stop else start))
        return stop

    def _cut(self, length: int) -> None:
        self._settled = (self._join() + self._stream.pending())[:length]
        self._length = length
        self._finished = True

    def _join(self) -> str:
        if self._fresh:
            self._settled += "".join(self._fresh)
            self._fresh.clear()
        return self._settled

    def finish(self) -> None:
        """Ends the text: what was held back becomes part of it as it stands. May be called again."""
        if not self._finished:
            text = self._join() + self._stream.pending()
            self._settled, self._length, self._finished = text, len(text), True

    @property
    def text(self) -> str:
        """The output text so far, an unfinished character as U+FFFD; cut at the stop string once there was one."""
        return self._join() if self._finished else self._join() + self._stream.pending()

    @property
    def stable_length(self) -> int:
        """Length of the prefix of `text` that no later token changes or removes."""
        if self._finished or self._include_stop or not self._stop:
            return self._length
        window = self._window
        held = (size for stop in self._stop for size in range(1, len(stop)) if window.endswith(stop[:size]))
        return self._length - max(held, default=0)
