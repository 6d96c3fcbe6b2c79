"""A folder that appears under its name when it is whole, or not at all."""

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

REMOVAL_PAUSE, REMOVAL_TRIES = 0.1, 50  # seconds
UNFINISHED_SECONDS = 60  # an empty folder without its lock may be one that is just being made


@contextlib.contextmanager
def output_directory(path: str | Path) -> Iterator[Path]:
    """Gives a temporary folder to fill; when the block ends it is synced to disk and renamed to `path`.

    The temporary folder lies beside `path`, as ``.NAME.partial-...``. A block that raises leaves nothing; a killed
    process leaves that folder, which the next one to write `path` removes (a running process holds a lock on its own).

    Raises:
        ValueError: `path` exists and is not an empty folder.
        OSError: it cannot be written, for lack of room, say; names it.
    """
    path = Path(path).expanduser().resolve()
    check_output(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path)
    partial = path.parent / f"{_prefix(path)}{secrets.token_hex(4)}"
    partial.mkdir()
    lock = os.open(partial, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with removed(partial, path, (BaseException,)):
            yield partial
            publish(partial, path)
    finally:
        os.close(lock)


@contextlib.contextmanager
def removed(partial: Path, path: Path, after: tuple[type[BaseException], ...]) -> Iterator[None]:
    """Removes the temporary folder of `path` after errors of these types, which go on and name `path`."""
    try:
        yield
    except after as error:
        _remove(partial)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # writing to an open file does not say to which
        raise


def publish(partial: Path, path: Path) -> None:
    """Syncs a whole folder to disk and gives it its name.

    Raises:
        ValueError: something has that name by now.
    """
    sync_folder(partial)
    try:
        os.rename(partial, path)  # also replaces an empty folder, and nothing else
    except OSError as error:
        raise ValueError(f"{path} was made by somebody else meanwhile ({error}); give another name") from error
    sync_entry(path.parent)


def check_room(path: str | Path, nbytes: int) -> None:
    """Raises ValueError if the disk that `path` is to be on has fewer bytes free."""
    folder = Path(path).expanduser().resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ValueError(
            f"output {path} takes {nbytes:,} bytes, and {free:,} are free there; free some, or go elsewhere"
        )


def check_output(path: str | Path) -> None:
    """Raises ValueError if something is at `path` already."""
    path = Path(path).expanduser()
    if path.is_dir():
        inside = next(iter(sorted(entry.name for entry in path.iterdir())), None)
        if inside is not None:
            raise ValueError(f"output {path} exists and is not empty (it has {inside}); remove it or give another name")
    elif path.exists():
        raise ValueError(f"output {path} exists and is a file; give the name of a folder")


def _prefix(path: Path) -> str:
    return f".{path.name}.partial-"


def _sweep(path: Path) -> None:
    """Removes what killed processes have left of this output."""
    for leftover in path.parent.glob(f"{_prefix(path)}*"):
        try:
            if time.time() - leftover.stat().st_mtime < UNFINISHED_SECONDS and not any(leftover.iterdir()):
                continue
            lock = os.open(leftover, os.O_RDONLY)
        except OSError:
            continue  # another process is sweeping too
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(leftover, ignore_errors=True)
        except OSError:
            continue  # its process lives
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    """Removes a folder whose writer has failed: threads of it may go on for a moment and put files back."""
    for _ in range(REMOVAL_TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(REMOVAL_PAUSE)
        if not folder.exists():
            return


def sync_folder(folder: Path) -> None:
    """Has all files of a folder written to the disk."""
    for root, _, files in os.walk(folder):
        for name in files:
            sync_entry(Path(root) / name)
        sync_entry(Path(root))


def sync_entry(path: Path) -> None:
    """Has a file's content, or a folder's list of names, written to the disk."""
    entry = os.open(path, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)
