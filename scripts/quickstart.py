"""Eight questions answered at once by a small real model, each streamed as it is written."""

import asyncio
import shutil
import sys
import time

BEGIN = time.perf_counter()  # importing JAX is part of what is timed

from jaxinfer import AsyncLLM, SamplingParams  # noqa: E402

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Name three uses of copper.",
    "Explain recursion to a child.",
    "What does a heart do?",
    "Give me a recipe for pancakes.",
    "Who wrote Hamlet, and when?",
)


class Board:
    """The growing answers: on a terminal a line each, rewritten in place; else piece by piece as they come."""

    PIECE = 60

    def __init__(self, questions: tuple[str, ...]) -> None:
        self.questions = questions
        self.texts = ["" for _ in questions]
        self.first_token: float | None = None
        self._live = sys.stdout.isatty()
        self._drawn = False
        self._shown = [0 for _ in questions]

    def update(self, index: int, text: str, finished: bool) -> None:
        """Takes the text of one answer so far."""
        if self.first_token is None:
            self.first_token = time.perf_counter() - BEGIN
            print(f"First token after {self.first_token:.1f} s.\n", flush=True)
        self.texts[index] = text
        if self._live:
            self._draw()
        elif finished or len(text) - self._shown[index] >= self.PIECE:
            print(f"{index + 1}| {' '.join(text[self._shown[index] :].split())}", flush=True)
            self._shown[index] = len(text)

    def _draw(self) -> None:
        room = shutil.get_terminal_size().columns - 4
        if self._drawn:
            print(f"\x1b[{len(self.texts)}A", end="")
        for number, text in enumerate(self.texts, start=1):
            print(f"\x1b[2K{number}| {' '.join(text.split())[-room:]}")
        sys.stdout.flush()
        self._drawn = True

    def show_answers(self) -> None:
        """The complete answers."""
        for question, text in zip(self.questions, self.texts, strict=True):
            print(f"\n> {question}\n{text.strip()}")


async def answer(llm: AsyncLLM, board: Board, index: int, params: SamplingParams) -> int:
    """Streams one answer to the board; returns its number of tokens."""
    num_tokens = 0
    async for output in llm.chat([{"role": "user", "content": board.questions[index]}], params):
        completion = output.outputs[0]
        num_tokens = len(completion.token_ids)
        board.update(index, completion.text, output.finished)
    return num_tokens


async def main() -> None:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m-instruct"
    print(f"Loading {model} ...", flush=True)
    llm = AsyncLLM(model, max_model_len=1024, max_num_seqs=len(QUESTIONS), max_num_batched_tokens=128)
    board = Board(QUESTIONS)
    params = SamplingParams(temperature=0, max_tokens=96)
    begin = time.perf_counter()
    counts = await asyncio.gather(*[answer(llm, board, index, params) for index in range(len(QUESTIONS))])
    seconds = time.perf_counter() - begin
    board.show_answers()
    print(f"\n{sum(counts)} tokens in {seconds:.1f} s: {sum(counts) / seconds:.0f} tokens/s for {len(counts)} answers.")
    print(f"First token {board.first_token:.1f} s after the start of this script.")
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
