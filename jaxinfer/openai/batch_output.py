"""Output of a batch job: a file of whole lines that a killed job's successor goes on with."""

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

LINE_ID = "jaxinfer-line-"
"""Start of the id of the result of a line without a custom_id; its number follows."""
_BEGIN = b'{"id": "jaxinfer-'


class BatchOutput:
    """The results of a batch job, one JSON object a line, opened for appending.

    What a killed job left half written at the end is cut off; the request concerned is not among `done`. The file is
    locked, so that two jobs cannot mix their lines.

    Args:
        path: made if it is not there.

    Raises:
        ValueError: the file holds something else, or another job writes to it.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        is_new = not path.exists()
        # Whoever removes the file or writes into it meanwhile is not stopped: the lock is advisory.
        self._file = path.open("ab+", buffering=0)
        try:
            self._lock()
            self.done = self._scan()
        except BaseException:
            self._file.close()
            raise
        if is_new:
            _sync_folder(path.parent)

    def write(self, results: Iterable[Mapping[str, Any]]) -> None:
        """Appends results and waits until they are on the disk."""
        text = "".join(json.dumps(result, ensure_ascii=False) + "\n" for result in results)
        # JSON can hold half a surrogate pair, which UTF-8 cannot; written as a JSON escape it stays what it was.
        rest = memoryview(text.encode("utf-8", "backslashreplace"))
        while rest:
            rest = rest[self._file.write(rest) :]
        os.fsync(self._file.fileno())

    def __enter__(self) -> "BatchOutput":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{self.path} is being written by another job; wait for it or give another file"
            ) from error

    def _scan(self) -> set[str | int]:
        """The keys (`BatchLine.key`) of the results that are there; cuts off a torn end."""
        done: set[str | int] = set()
        whole = 0
        self._file.seek(0)
        with open(self._file.fileno(), "rb", closefd=False) as reader:
            for number, raw in enumerate(reader, start=1):
                if not raw.endswith(b"\n"):
                    self._check_torn(raw, number)
                    break
                done.add(self._key(raw, number))
                whole += len(raw)
        self._file.truncate(whole)
        return done

    def _check_torn(self, raw: bytes, number: int) -> None:
        """An end without a newline is ours to cut only if it is how one of our lines begins, or blank disk."""
        start = raw.rstrip(b"\0")[: len(_BEGIN)]
        if not _BEGIN.startswith(start):
            raise self._foreign(number)

    def _key(self, raw: bytes, number: int) -> str | int:
        try:
            result = json.loads(raw)
            custom_id, result_id = result["custom_id"], str(result["id"])
            return int(result_id.removeprefix(LINE_ID)) if custom_id is None else str(custom_id)
        except (ValueError, TypeError, KeyError) as error:
            raise self._foreign(number) from error

    def _foreign(self, number: int) -> ValueError:
        return ValueError(f"{self.path}: line {number} is not the result of a batch job; give another output file")


def _sync_folder(folder: Path) -> None:
    """Puts a new file's name on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
