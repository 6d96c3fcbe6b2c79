"""Texts that the student writes while it learns: on-policy distillation (arXiv:2306.13649)."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxinfer.training.packing import PackedRows, batch_rows, pack
from jaxinfer.training.teacher_texts import Writing, write_texts

if TYPE_CHECKING:
    from jaxinfer.llm import LLM


class StudentTexts:
    """Rows of the student's own texts, written anew every so many steps by what it has become.

    A round's texts are kept on disk as soon as they are written, so that a resumed run has the same.

    Args:
        folder: where they go, of this run alone.
        prompts: token ids of what it continues.
        writing: how many texts a round has, and how they are drawn.
        ends: ids that end a text.
        seq_len: tokens of a row.
        every: steps of a round.
        make_llm: starts an engine with these parameters.
    """

    def __init__(
        self,
        folder: Path,
        prompts: Sequence[Sequence[int]],
        writing: Writing,
        ends: frozenset[int],
        seq_len: int,
        every: int,
        make_llm: Callable[[Any], "LLM"],
    ) -> None:
        self._folder, self._prompts, self._writing, self._ends = folder, prompts, writing, ends
        self._seq_len, self._every, self._make_llm = seq_len, every, make_llm
        self._rows: tuple[int, PackedRows] | None = None

    def rows(self, step: int, batch_size: int, seed: int, params: Any) -> PackedRows:
        """The rows of a step, from 0. `params`: the student's before it."""
        number, place = divmod(step, self._every)
        if self._rows is None or self._rows[0] != number:
            own = replace(self._writing, seed=self._writing.seed + number * self._writing.texts)
            folder = self._folder / f"round_{number:06}"
            texts = write_texts(
                folder, self._prompts, own, self._ends, lambda: self._make_llm(params), {"round": number}
            )
            self._rows = number, pack(texts, self._seq_len)
        rows = self._rows[1]
        which: np.ndarray = batch_rows(len(rows), batch_size, place, seed + number)
        return rows.rows(which)
