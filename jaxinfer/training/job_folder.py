"""The folder of a run: what a killed one has done is there for the next."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.output_directory import check_output
from jaxinfer.checkpoint.resumable_directory import PROGRESS, Work, partial_of, resumable_directory


def check_resume(output: Path, resume: bool) -> None:
    """Raises ValueError where there is something at `output`, or an unfinished run of it and `resume` is False."""
    check_output(output)
    if not resume and (partial_of(output) / PROGRESS).is_file():
        raise ValueError(
            f"an unfinished run of {output} lies in {partial_of(output)}; give --resume (resume=True) to go on with "
            "it, or remove that folder to start again"
        )


@contextlib.contextmanager
def job_folder(output: Path, identity: Mapping[str, Any]) -> Iterator[Work]:
    """`resumable_directory` for work that took hours: whatever fails in it, what is done stays.

    Raises:
        ValueError: as `resumable_directory`, before the block.
        RuntimeError: the block failed by a ValueError or an OSError, such as a full disk.
    """
    entered = False
    try:
        with resumable_directory(output, identity) as work:
            entered = True
            work.save(work.progress)
            try:
                yield work
            except (ValueError, OSError) as error:
                raise RuntimeError(
                    f"{error}; what is done stays in {partial_of(output)}, give --resume (resume=True) to go on"
                ) from error
    except OSError as error:
        if not entered:
            raise
        raise RuntimeError(f"{output} could not be finished: {error}") from error
