"""A folder that is filled step by step, in several runs if need be, and appears under its name when it is whole."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxinfer.checkpoint.output_directory import check_output, publish, removed, sync_entry

PROGRESS = "progress.json"


class Work:
    """A folder in the making, and what it needs to know to go on after the process has been killed.

    Attributes:
        folder: where the files go.
        progress: what `save` was last given, by a run before this one perhaps; empty at the beginning.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        self.progress: dict[str, Any] = {}
        self._identity = json.loads(json.dumps(dict(identity)))

    def save(self, progress: Mapping[str, Any]) -> None:
        """Remembers how far the work is, once everything that it counts on is on the disk.

        Args:
            progress: of JSON's types.
        """
        self.progress = dict(progress)
        fresh = self.folder / f"{PROGRESS}.new"
        fresh.write_text(json.dumps({"identity": self._identity, "progress": self.progress}), encoding="utf-8")
        sync_entry(fresh)
        fresh.replace(self.folder / PROGRESS)
        sync_entry(self.folder)

    def _resume(self) -> None:
        """Takes up what an earlier run left, or clears away what it left before it remembered anything."""
        try:
            said = json.loads((self.folder / PROGRESS).read_text(encoding="utf-8"))
            identity, self.progress = said["identity"], said["progress"]
        except (OSError, ValueError, KeyError, TypeError):
            for entry in self.folder.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            return
        differing = [key for key in {**self._identity, **identity} if self._identity.get(key) != identity.get(key)]
        if differing:
            was = ", ".join(
                f"{key} {_short(identity.get(key))} then, {_short(self._identity.get(key))} now" for key in differing
            )
            raise ValueError(
                f"{self.folder} holds an unfinished run of another kind ({was}); run the same command as then to "
                "finish it, or remove that folder to start again"
            )


@contextlib.contextmanager
def resumable_directory(path: str | Path, identity: Mapping[str, Any]) -> Iterator[Work]:
    """Gives a folder to fill; when the block ends it is synced to disk and renamed to `path`.

    The folder lies beside `path`, as ``.NAME.partial-resumable``. A killed or interrupted process leaves it, and the
    next one of the same identity goes on with it; nothing else reads it, and a conversion to the same `path` removes
    it. A block that raises ValueError or OSError would do so again and leaves nothing; what a block that ended has made
    stays there until it has its name, whatever comes in between.

    Args:
        path: as for `output_directory`.
        identity: of JSON's types: what makes it the same work, by names that users know.

    Raises:
        ValueError: `path` exists and is not an empty folder, at the beginning or at the end, another process is at it,
            or what was left is of another identity; names the difference.
        OSError: it cannot be written, for lack of room, say; names it.
    """
    path = Path(path).expanduser().resolve()
    check_output(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    lock = _locked(partial, path)
    try:
        work = Work(partial, identity)
        work._resume()
        with removed(partial, path, (ValueError, OSError)):
            yield work
        publish(partial, path)
        (path / PROGRESS).unlink(missing_ok=True)  # not before: without it what failed to be published would be lost
    finally:
        os.close(lock)


def partial_of(path: str | Path) -> Path:
    """The folder in which `path` is made."""
    path = Path(path).expanduser().resolve()
    return path.parent / f".{path.name}.partial-resumable"


def _locked(partial: Path, path: Path) -> int:
    """Makes the folder where it is missing, and locks it; the lock ends with the file descriptor."""
    while True:
        partial.mkdir(exist_ok=True)
        try:
            lock = os.open(partial, os.O_RDONLY)
        except FileNotFoundError:
            continue  # somebody swept it away in between
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise ValueError(
                f"output {path} is being written by another process; wait for it, or give another name"
            ) from None
        except OSError:
            return lock  # some network file systems have no locks
        if partial.is_dir() and os.stat(partial).st_ino == os.fstat(lock).st_ino:
            return lock
        os.close(lock)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
