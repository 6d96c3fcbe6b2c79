"""The data of a run: rows to learn from, and rows to measure on."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.tokenizers.tokenizer import Tokenizer
from jaxinfer.training.documents import encode_prompts, encode_rows, read_rows
from jaxinfer.training.packing import PackedRows, pack
from jaxinfer.training.teacher_texts import Writing, write_texts

if TYPE_CHECKING:
    from jaxinfer.llm import LLM

SEQUENCES = 32
"""Texts that the teacher writes at a time."""


@dataclass(frozen=True)
class DataOptions:
    """Where the texts come from.

    Attributes:
        files: text files or .jsonl, see `read_rows`; none where the teacher writes the texts itself.
        prompts: with texts of the teacher's: files of what it continues; none lets it begin from its first token.
        writing: with texts of the teacher's: how many, and how they are drawn.
        answers_only: with texts of the teacher's: its own tokens are learned and measured on, and prompts only seen.
        seq_len: tokens of a row, at least 2.
        eval_files: what to measure on; none takes rows of the data.
        eval_fraction: in that case the share of rows that are kept out of training, 0 to below 1.
        seed: chooses those rows.

    Raises:
        ValueError: a number is out of range, or two of them contradict each other.
    """

    files: tuple[Path, ...] = ()
    prompts: tuple[Path, ...] = ()
    writing: Writing | None = None
    answers_only: bool = False
    seq_len: int = 512
    eval_files: tuple[Path, ...] = ()
    eval_fraction: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if bool(self.files) == (self.writing is not None):
            raise ValueError("data must be files, or 'generate' for texts that the teacher writes")
        if self.prompts and self.writing is None:
            raise ValueError("prompts are for data='generate': the teacher continues them")
        if self.answers_only and self.writing is None:
            raise ValueError("answers_only is for data='generate', where prompts are told from what the teacher adds")
        if self.seq_len < 2:
            raise ValueError(f"seq_len={self.seq_len} must be at least 2")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction={self.eval_fraction} must be 0 to below 1")

    def identity(self) -> dict[str, Any]:
        """What the data depends on, files by their contents."""
        writing = None if self.writing is None else asdict(self.writing)
        files = {name: [_digest(file) for file in getattr(self, name)] for name in ("files", "prompts", "eval_files")}
        return {**asdict(self), "writing": writing, **files}


class Corpus:
    """Encoded data of one teacher.

    Args:
        options: where it comes from.
        tokenizer: of the teacher.
        checkpoint: of the teacher.

    Raises:
        ValueError: a file is unusable, by name; a prompt leaves no room for an answer; or seq_len is longer than what
            the model takes.
        OSError: a file cannot be read.
    """

    def __init__(self, options: DataOptions, tokenizer: Tokenizer, checkpoint: Checkpoint) -> None:
        longest = checkpoint.model_config.max_position_embeddings
        if options.seq_len > longest:
            raise ValueError(f"seq_len={options.seq_len} exceeds the {longest} positions of {checkpoint.path}")
        self._options, self._checkpoint = options, checkpoint
        end = tokenizer.eos_token_id
        self._ends = checkpoint.eos_token_ids | (frozenset() if end is None else {end})
        self._held_out = _packed(options, tokenizer, options.eval_files) if options.eval_files else None
        self._rows = _packed(options, tokenizer, options.files) if options.files else None
        self._prompts = [] if options.files else list(self._openings(tokenizer))

    @property
    def prompts(self) -> list[list[int]]:
        """Token ids of what the teacher, or the student, continues; none where the texts are those of files."""
        return self._prompts

    @property
    def ends(self) -> frozenset[int]:
        """Ids that end a text."""
        return self._ends

    @property
    def held_out(self) -> PackedRows | None:
        """The rows to measure on, where there are files of them."""
        return self._held_out

    @property
    def longest(self) -> int:
        """Tokens of the longest text that is written."""
        writing = self._options.writing
        return 0 if writing is None else max(map(len, self._prompts)) + writing.max_tokens

    @property
    def options(self) -> DataOptions:
        """What it was made from."""
        return self._options

    @property
    def texts_to_write(self) -> int:
        """How many texts the teacher is to write."""
        return 0 if self._options.writing is None else self._options.writing.texts

    def rows(
        self, folder: Path, make_llm: Callable[..., "LLM"], on_texts: Callable[[int], object]
    ) -> tuple[PackedRows, PackedRows | None]:
        """The rows to learn from, and those to measure on.

        Args:
            folder: where the teacher's own texts are kept.
            make_llm: starts the teacher's engine with these keywords of `LLM`.
            on_texts: told how many texts have been finished.

        Raises:
            ValueError: too few rows to keep some of them out; or see `write_texts`.
            RuntimeError: see `write_texts`.
        """
        rows = self._rows
        if rows is None:
            writing = self._options.writing
            assert writing is not None
            texts = write_texts(
                folder,
                self._prompts,
                writing,
                self._ends,
                lambda: make_llm(max_model_len=self.longest, max_num_seqs=SEQUENCES),
                {"teacher": str(self._checkpoint.path)},
                on_texts,
            )
            openings = [len(self._prompts[number % len(self._prompts)]) for number in range(len(texts))]
            rows = pack(texts, self._options.seq_len, openings if self._options.answers_only else None)
        if self._held_out is not None or not self._options.eval_fraction:
            return rows, self._held_out
        count = max(1, round(len(rows) * self._options.eval_fraction))
        if count == len(rows):
            raise ValueError(
                f"the data makes a single row of {self._options.seq_len} tokens, of which none can be kept "
                "out to measure on; give more data, a smaller seq_len, or eval_fraction=0"
            )
        order = np.random.default_rng([self._options.seed, 0]).permutation(len(rows))
        return rows.rows(np.sort(order[count:])), rows.rows(np.sort(order[:count]))

    def _openings(self, tokenizer: Tokenizer) -> Iterator[list[int]]:
        """What the teacher continues."""
        writing = self._options.writing
        assert writing is not None
        room = self._checkpoint.model_config.max_position_embeddings - writing.max_tokens
        if not self._options.prompts:
            first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
            if first is None:
                raise ValueError(f"{self._checkpoint.path} has no token that a text begins with; give prompts")
            yield [first]
            return
        for prompt in encode_prompts(read_rows(self._options.prompts), tokenizer):
            if not prompt or len(prompt) > room:
                raise ValueError(
                    f"a prompt has {len(prompt)} tokens; with max_tokens={writing.max_tokens} the model takes 1 to "
                    f"{room}"
                )
            yield prompt


def batches(rows: PackedRows, batch_size: int) -> Iterator[dict[str, np.ndarray]]:
    """All rows in order, some at a time; the last batch is filled up with padding."""
    for first in range(0, len(rows), batch_size):
        yield rows.rows(np.arange(first, min(first + batch_size, len(rows)))).filled(batch_size).batch()


def mean_over(rows: PackedRows, batch_size: int, sums_of: Callable[[Any], Any]) -> dict[str, float]:
    """Means over the tokens of rows, of what a `make_evaluation` sums up."""
    return mean_of(sums_of(batch) for batch in batches(rows, batch_size))


def mean_of(sums: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Means over all tokens, of what a `make_evaluation` sums up for one batch after the other."""
    total: dict[str, float] = {}
    for found in sums:
        for name, value in found.items():
            total[name] = total.get(name, 0.0) + float(value)
    weight = max(total.pop("weight"), 1.0)
    return {name: value / weight for name, value in total.items()}


def _packed(options: DataOptions, tokenizer: Tokenizer, files: tuple[Path, ...]) -> PackedRows:
    return pack(encode_rows(read_rows(files), tokenizer), options.seq_len)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:32]
