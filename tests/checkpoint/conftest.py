"""Fixtures of the checkpoint tests: the committed tiny models, a forward pass, and a GGUF writer."""

import importlib.util
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.models.config import ModelConfig

DATA = Path(__file__).parent.parent / "data"
FAMILIES = DATA / "families"
CASES = sorted(path.stem for path in FAMILIES.glob("*.json") if not path.stem.endswith(("_wrapped", "_edges")))


def _beside_the_data(name: str) -> Any:
    """A module that the scripts that make the references, which are no part of a package, have beside them."""
    spec = importlib.util.spec_from_file_location(name, DATA / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


random_weight = _beside_the_data("family_weights").random_weight
family_gguf = _beside_the_data("family_gguf")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    return Path(__file__).parent.parent / "data"


@pytest.fixture(scope="session")
def reference(data_dir: Path) -> Callable[[str], Mapping[str, np.ndarray]]:
    """`reference("tiny_llama")`: transformers' tokens and float32 logits for that folder."""
    return lambda name: np.load(data_dir / name / "reference.npz")


@pytest.fixture(scope="session")
def all_logits() -> Callable[..., np.ndarray]:
    """`all_logits(config, params, tokens)`: float32 `[L, V]` by the decoder with textbook causal attention."""
    import jax
    import jax.numpy as jnp

    from jaxinfer.models.attention import split_rotated
    from jaxinfer.models.decoder import Decoder

    def attend(qkv: Any, angles: Any, cache: Any, sight: Any) -> Any:
        q, k, v = split_rotated(qkv, angles)
        group = q.shape[1] // k.shape[1]
        k, v = (jnp.repeat(x, group, axis=1) for x in (k, v))
        scores = jnp.einsum("tnh,snh->nts", q, k) * (sight.scale or q.shape[-1] ** -0.5)
        if sight.softcap is not None:
            scores = sight.softcap * jnp.tanh(scores / sight.softcap)
        distance = jnp.arange(q.shape[0])[:, None] - jnp.arange(q.shape[0])
        seen = (distance >= 0) & (distance < (sight.window or q.shape[0]))
        return jnp.einsum("nts,snh->tnh", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf)), v), cache

    def run(config: ModelConfig, params: Any, tokens: Any) -> np.ndarray:
        decoder, caches = Decoder(config), [None] * config.num_hidden_layers

        @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})  # LLVM would take most of the time
        def forward(params: Any, tokens: jax.Array) -> jax.Array:
            positions = jnp.arange(len(tokens))
            hidden, _ = decoder.apply({"params": params}, tokens, positions, jax.tree_util.Partial(attend), caches)
            return decoder.apply({"params": params}, hidden, method=Decoder.logits)

        return np.asarray(forward(params, jnp.asarray(tokens, jnp.int32)))

    return run


@pytest.fixture
def hf_copy(data_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """`hf_copy("tiny_llama", tensors, **config)`: that folder again, with other tensors and config fields."""
    from safetensors.numpy import load_file, save_file

    def copy(name: str, edit: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None, **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        merged = {**json.loads((data_dir / name / "config.json").read_text()), **config}
        (folder / "config.json").write_text(json.dumps({key: merged[key] for key in merged if merged[key] is not ...}))
        tensors = load_file(data_dir / name / "model.safetensors")
        edit(tensors)
        save_file({key: np.ascontiguousarray(tensors[key]) for key in tensors}, folder / "model.safetensors")
        return folder

    return copy


@pytest.fixture
def gguf_twin(data_dir: Path, tmp_path: Path) -> Callable[..., Path]:
    """`gguf_twin("tiny_llama", "Q8_0", extra={...})`: the folder as llama.cpp's converter would write it.

    Matrices get the type given, vectors F32; `extra` tensors are added as float32, `metadata` to the file's own.
    """
    from safetensors.numpy import load_file

    def write(
        name: str, kind: str = "F32", extra: Mapping[str, np.ndarray] | None = None, metadata: Any = None
    ) -> Path:
        config = json.loads((data_dir / name / "config.json").read_text())
        weights = load_file(data_dir / name / "model.safetensors")
        tokens = {"eos_token_id": config["eos_token_id"], "tokens": ["<unk>", "<s>", "</s>"]}
        path = tmp_path / f"{name}-{kind}.gguf"
        family_gguf.write_gguf(
            path,
            config,
            {key: value.astype(np.float32) for key, value in weights.items()},
            config["model_type"],
            kind,
            fields={f"tokenizer.ggml.{key}": value for key, value in tokens.items()} | (metadata or {}),
            tensors={key: value.astype(np.float32) for key, value in (extra or {}).items()},
        )
        return path

    return write


@dataclass(frozen=True)
class FamilyCase:
    """One case of tests/data/families, whose checkpoint is made when asked for."""

    name: str
    description: Mapping[str, Any]
    references: Mapping[str, np.ndarray]
    scratch: Path

    @property
    def config(self) -> dict[str, Any]:
        return dict(self.description["config"])

    @property
    def tokens(self) -> list[int]:
        return self.description["tokens"]

    @property
    def greedy(self) -> list[int]:
        return self.description["greedy"]

    @property
    def lengths(self) -> list[int]:
        return sorted(int(key.removeprefix("logits_")) for key in self.references if key.startswith("logits_"))

    def logits(self, length: int) -> np.ndarray:
        return self.references[f"logits_{length}"]

    def weights(self) -> dict[str, np.ndarray]:
        unit_offset = self.description["unit_offset"]
        shapes = self.description["tensors"]
        values = {name: random_weight(name, tuple(shape), unit_offset=unit_offset) for name, shape in shapes.items()}
        scales = self.description.get("scales", {})
        return values | {name: values[name] * np.float32(scale) for name, scale in scales.items()}

    def folder(self, rounding: str = "F32", **config: Any) -> Path:
        """The checkpoint's directory, with other config fields if need be (`...` leaves one out), and its matrices
        rounded as a GGUF file of that type rounds them."""
        from safetensors.numpy import save_file

        merged = {**self.config, **config}
        (self.scratch / "config.json").write_text(
            json.dumps({key: merged[key] for key in merged if merged[key] is not ...})
        )
        weights = {name: _rounded(value, rounding) for name, value in self.weights().items()}
        save_file(weights, self.scratch / "model.safetensors")
        return self.scratch

    def twin_folder(self, rounding: str = "F32") -> Path:
        """The directory of which `write_gguf` makes the twin."""
        return self.folder(rounding, **family_gguf.TWINS[self.name][1])

    def write_gguf(self, path: Path, kind: str) -> None:
        """Its twin as a GGUF file, matrices of that type."""
        arch, changes = family_gguf.TWINS[self.name]
        family_gguf.write_gguf(path, family_gguf.changed(self.config, changes), self.weights(), arch, kind)

    @property
    def bfloat16_error(self) -> float:
        """How far transformers' own logits are from these in bfloat16: mean of the absolute difference."""
        return float(self.references["bfloat16_error"])

    def served_for(self, config: ModelConfig, length: int) -> ModelConfig:
        """The config as the engine has it when its longest sequence is `length`."""
        return replace(config, rope_length=length)


def _rounded(value: np.ndarray, kind: str) -> np.ndarray:
    import gguf

    if value.ndim == 1 or len(value) == 1 or kind == "F32":
        return value
    qtype = gguf.GGMLQuantizationType[kind if value.shape[-1] % 32 == 0 else "F16"]
    return gguf.quants.dequantize(gguf.quants.quantize(value, qtype), qtype)


@pytest.fixture
def make_case(tmp_path: Path) -> Callable[[str], FamilyCase]:
    """`make_case("gemma2")`."""

    def make(name: str) -> FamilyCase:
        description = json.loads((FAMILIES / f"{name}.json").read_text())
        with np.load(FAMILIES / f"{name}.npz") as file:
            references = {key: file[key] for key in file.files}
        scratch = tmp_path / name
        scratch.mkdir()
        return FamilyCase(name, description, references, scratch)

    return make


@pytest.fixture
def twin(tmp_path: Path) -> Callable[[FamilyCase, str], Path]:
    """`twin(case, "Q8_0")`: the case as a GGUF file."""

    def write(case: FamilyCase, kind: str) -> Path:
        path = tmp_path / f"{case.name}-{kind}.gguf"
        case.write_gguf(path, kind)
        return path

    return write


@pytest.fixture(params=CASES)
def family_case(request: pytest.FixtureRequest, make_case: Callable[[str], FamilyCase]) -> FamilyCase:
    """Every case in turn, but for text models that are wrapped in larger ones, and long texts."""
    return make_case(request.param)


@pytest.fixture(params=["mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "cohere2"])
def window_case(request: pytest.FixtureRequest, make_case: Callable[[str], FamilyCase]) -> FamilyCase:
    """Cases with a window in some layers."""
    return make_case(request.param)


@pytest.fixture(params=["llama_dynamic", "llama_dynamic_edges", "phi3_longrope"])
def edge_case(request: pytest.FixtureRequest, make_case: Callable[[str], FamilyCase]) -> FamilyCase:
    """Cases with logits of several lengths."""
    return make_case(request.param)


def _one_of_each_family() -> list[str]:
    configs = {name: json.loads((FAMILIES / f"{name}.json").read_text())["config"] for name in CASES}
    return list({config["model_type"]: name for name, config in configs.items()}.values())


@pytest.fixture(params=_one_of_each_family())
def bf16_case(request: pytest.FixtureRequest, make_case: Callable[[str], FamilyCase]) -> FamilyCase:
    """One case of each family."""
    return make_case(request.param)


@pytest.fixture
def small_model(
    write_checkpoint: Callable[..., Path], tiny_config: ModelConfig, random_params: Callable[..., Any]
) -> Path:
    """A directory with two layers, an untied head, a tokenizer, a chat template and a generation config."""
    config = replace(tiny_config, vocab_size=258)
    folder = write_checkpoint(config, random_params(config, scale=0.1), eos_token_id=7)
    (folder / "generation_config.json").write_text('{"temperature": 0.3}')
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}!")
    return folder


@pytest.fixture(scope="session")
def stored_params() -> Callable[[Path], Any]:
    """`stored_params(folder)`: a quantised checkpoint's parameters with the codes of its files, as NumPy arrays."""

    def load(folder: Path) -> Any:
        import jax

        from jaxinfer.checkpoint import load_params, open_checkpoint
        from jaxinfer.startup.quantization import QuantOptions, quant_plan

        checkpoint = open_checkpoint(folder)
        plan = quant_plan(None, QuantOptions(fast_form=False), checkpoint.model_config, checkpoint, "cpu")
        assert plan is not None
        return jax.tree.map(np.asarray, load_params(checkpoint, "float32", plan=plan))

    return load
