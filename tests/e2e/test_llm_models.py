"""What an LLM takes from its model: ends, sampling defaults, live parameters; and what it gives back at the end."""

import gc
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM, AsyncLLM, EngineDeadError, ModelConfig, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
SCRIPT = [5, 9, 3, 0, 2, 257, 5]


def tokens(llm: LLM, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture
def model(scripted_model: Callable[..., Any], write_checkpoint: Callable[..., Path]) -> Callable[..., Path]:
    """A checkpoint that says SCRIPT round and round; `generation` becomes its generation_config.json."""

    def make(generation: dict[str, Any] | None = None, **config_json: Any) -> Path:
        folder = write_checkpoint(*scripted_model(SCRIPT, 258), **config_json)
        if generation is not None:
            (folder / "generation_config.json").write_text(json.dumps(generation))
        return folder

    return make


@pytest.mark.parametrize(
    ("config_eos", "generation", "output"),
    [
        (257, None, [9, 3, 0, 2, 257]),
        (None, {}, [9, 3, 0, 2, 257]),  # the tokenizer's own
        (0, {}, [9, 3, 0]),
        ([2, 3], {}, [9, 3]),
        (257, {"eos_token_id": 0}, [9, 3, 0]),
        (257, {"eos_token_id": [2, 9]}, [9]),
        ([0, 2], {"eos_token_id": None}, [9, 3, 0]),
    ],
)
def test_every_named_end_ends(
    model: Callable[..., Path], small: dict[str, Any], config_eos: Any, generation: Any, output: list[int]
) -> None:
    """Field case 11: the union of tokenizer, config and generation config, 0 included."""
    llm = LLM(model(generation, eos_token_id=config_eos), **small)
    result = llm.generate([5], GREEDY, use_tqdm=False)[0].outputs[0]
    assert (result.token_ids, result.finish_reason, result.stop_reason) == (output, "stop", None)
    going_on = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    assert tokens(llm, [5], going_on) == [9, 3, 0, 2, 257, 5, 9, 3]
    stopped = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=[5])
    result = llm.generate([5], stopped, use_tqdm=False)[0].outputs[0]
    assert (result.token_ids, result.stop_reason) == ([9, 3, 0, 2, 257, 5], 5)


def test_sampling_defaults_come_from_the_generation_config(
    model: Callable[..., Path], small: dict[str, Any], tmp_path: Path
) -> None:
    folder = model({"temperature": 0.3, "top_k": 5, "max_new_tokens": 3, "do_sample": True, "eos_token_id": 2})
    llm = LLM(folder, **small)
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.max_tokens) == (0.3, 5, 1.0, 3)
    assert llm.generate([5], use_tqdm=False)[0].outputs[0].token_ids == [9, 3, 0]
    assert tokens(llm, [5]) == [9, 3, 0, 2]  # explicit parameters take nothing from the file

    plain = LLM(folder, generation_config="vllm", **small)
    assert plain.get_default_sampling_params() == SamplingParams()
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5, "eos_token_id": 3}')
    other = LLM(folder, generation_config=tmp_path, override_generation_config={"min_p": 0.1}, **small)
    defaults = other.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_p, defaults.min_p) == (1.0, 0.5, 0.1)
    assert tokens(other, [5]) == [9, 3]
    ending = LLM(folder, generation_config="vllm", override_generation_config={"eos_token_id": [9]}, **small)
    assert tokens(ending, [5]) == [9]
    with pytest.raises(ValueError, match="generation_config='nowhere'"):
        LLM(folder, generation_config="nowhere", **small)
    with pytest.raises(ValueError, match="top_p=3"):
        LLM(folder, override_generation_config={"top_p": 3.0}, **small)


def test_update_params_equals_a_fresh_engine(
    tiny_config: ModelConfig, tiny_params: Callable[[int], Any], small: dict[str, Any]
) -> None:
    prompt, params = list(range(48)), SamplingParams(temperature=0, max_tokens=20)
    one, two = (LLM(model_config=tiny_config, params=tiny_params(seed), **small) for seed in (1, 2))
    first, second = tokens(one, prompt, params), tokens(two, prompt, params)
    assert first != second
    compiled = one.stats().num_compiled
    one.update_params(tiny_params(2))
    assert tokens(one, prompt, params) == second
    one.update_params(jax.tree.map(jax.numpy.asarray, tiny_params(1)))
    assert tokens(one, prompt, params) == first
    assert one.stats().num_compiled == compiled


def edited(tree: Any, path: str, leaf: Any) -> Any:
    """A copy of the tree with another leaf; None removes it."""
    name, _, rest = path.partition("/")
    copy = dict(tree)
    if rest:
        copy[name] = edited(tree[name], rest, leaf)
    elif leaf is None:
        del copy[name]
    else:
        copy[name] = leaf
    return copy


@pytest.mark.parametrize(
    ("path", "leaf", "message"),
    [
        (
            "layers_1/mlp/down/kernel",
            np.zeros((64, 100), np.float32),
            r"'layers_1/mlp/down/kernel' has shape \(64, 1",
        ),
        ("final_norm/scale", np.zeros(64, np.float16), "'final_norm/scale' has dtype float16, not float32"),
        ("layers_0/attn/out/kernel", None, "no 'layers_0/attn/out/kernel'"),
        (
            "layers_0/attn/out/bias",
            np.zeros(64, np.float32),
            "'layers_0/attn/out/bias', which this model does",
        ),
        ("layers_0/attn", np.zeros(3, np.float32), "'layers_0/attn' is ndarray, not a mapping"),
        ("lm_head/kernel", [1.0], "'lm_head/kernel' is list, not an array"),
    ],
)
def test_parameters_that_do_not_fit_name_the_leaf(
    llm: LLM, text_config: ModelConfig, text_params: Any, small: dict[str, Any], path: str, leaf: Any, message: str
) -> None:
    wrong = edited(text_params, path, leaf)
    with pytest.raises(ValueError, match=message):
        llm.update_params(wrong)
    with pytest.raises(ValueError, match=message):
        LLM(model_config=text_config, params=wrong, **small)


def test_arrays_that_changed_hands(
    tiny_config: ModelConfig, tiny_params: Callable[[int], Any], small: dict[str, Any]
) -> None:
    numpy_params = jax.tree.map(aligned_copy, tiny_params(1))
    llm = LLM(model_config=tiny_config, params=numpy_params, **small)
    expected = tokens(llm, [1, 2, 3])
    numpy_params["embed"]["embedding"][:] = 0  # theirs to change; the engine has a copy
    assert tokens(llm, [1, 2, 3]) == expected
    donated = jax.tree.map(jax.numpy.asarray, tiny_params(2))
    donated["final_norm"]["scale"].delete()
    with pytest.raises(ValueError, match="'final_norm/scale' has been deleted, probably donated"):
        llm.update_params(donated)
    assert tokens(llm, [1, 2, 3]) == expected


def aligned_copy(leaf: np.ndarray) -> np.ndarray:
    """A copy that the CPU device could take over as it is."""
    raw = np.empty(leaf.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
    copy[...] = leaf
    return copy


def test_sources_that_contradict(text_config: ModelConfig, text_params: Any, small: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="model=None: give a model, or params"):
        LLM(**small)
    with pytest.raises(ValueError, match="params without model_config"):
        LLM(params=text_params, **small)
    with pytest.raises(ValueError, match="model_config without params"):
        LLM("smollm2-135m-instruct", model_config=text_config, **small)
    with pytest.raises(TypeError, match=r"model_config=\{\} must be a jaxinfer\.ModelConfig"):
        LLM(model_config={}, params=text_params, **small)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokenizer='./nowhere': .*does not exist"):
        LLM(model_config=text_config, params=text_params, tokenizer="./nowhere", **small)
    with pytest.raises(ValueError, match=r"variables\['params'\]"):
        LLM(model_config=text_config, params={"params": text_params}, **small)
    with pytest.raises(ValueError, match="dtype float32, not bfloat16"):
        LLM(model_config=text_config, params=text_params, dtype="bfloat16", **small)


def test_live_arrays_are_used_without_a_copy(tiny_config: ModelConfig, tiny_params: Any, small: dict[str, Any]) -> None:
    params = jax.tree.map(jax.numpy.asarray, tiny_params(0))
    before = sum(array.nbytes for array in jax.live_arrays())
    llm = LLM(model_config=tiny_config, params=params, num_gpu_blocks_override=4, **small)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    pool = 5 * 16 * 2 * tiny_config.num_key_value_heads * tiny_config.head_dim * 4 * tiny_config.num_hidden_layers
    grown = sum(array.nbytes for array in jax.live_arrays()) - before
    assert pool <= grown < pool + weights / 2
    llm.shutdown()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_deleting_gives_everything_back(
    kind: type[LLM] | type[AsyncLLM], tiny_config: ModelConfig, tiny_params: Any, small: dict[str, Any]
) -> None:
    """Field case 25: three times in a row, live arrays and threads return to the start."""
    import asyncio

    async def serve(engine: AsyncLLM) -> list[int]:
        return (await engine.generate([1, 2, 3], GREEDY)).outputs[0].token_ids

    def use() -> list[int]:
        engine = kind(model_config=tiny_config, params=tiny_params(0), **small)
        if isinstance(engine, AsyncLLM):
            return asyncio.run(serve(engine))
        return tokens(engine, [1, 2, 3])

    gc.collect()
    nbytes = sum(array.nbytes for array in jax.live_arrays())
    threads = threading.active_count()
    outputs = []
    for _ in range(3):
        outputs.append(use())
        gc.collect()
        assert sum(array.nbytes for array in jax.live_arrays()) <= nbytes + 2**20
        assert threading.active_count() == threads
    assert outputs[0] == outputs[1] == outputs[2]


def test_progress_bars_leave_no_thread(
    scripted_checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """tqdm's monitor thread would outlive the bar of loading."""
    monkeypatch.setattr("tqdm.std.tqdm.monitor", None)
    threads = set(threading.enumerate())
    LLM(scripted_checkpoint(SCRIPT), enforce_eager=True)
    shown = capsys.readouterr().err
    assert "Loading weights: 100%" in shown
    assert set(threading.enumerate()) <= threads


def test_two_engines_at_once(
    tiny_config: ModelConfig, tiny_params: Callable[[int], Any], small: dict[str, Any]
) -> None:
    engines = [LLM(model_config=tiny_config, params=tiny_params(seed), **small) for seed in (1, 2)]
    both = [tokens(engine, [1, 2, 3]) for engine in engines]
    again = [tokens(engine, [1, 2, 3]) for engine in reversed(engines)]
    assert both == again[::-1] and both[0] != both[1]


def test_shutdown(tiny_config: ModelConfig, tiny_params: Any, small: dict[str, Any]) -> None:
    with LLM(model_config=tiny_config, params=tiny_params(0), **small) as llm:
        assert tokens(llm, [1])
    for call in (lambda: llm.generate([1], GREEDY), lambda: llm.update_params(tiny_params(0)), llm.stats):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()
    llm.shutdown()


def test_a_failed_step(
    tiny_config: ModelConfig, tiny_params: Any, small: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model_config=tiny_config, params=tiny_params(0), **small)

    def fail(plan: object) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(llm._parts.engine.runner, "execute", fail)
    with pytest.warns(UserWarning, match="2 of 2 prompts ended with an error.*RESOURCE_EXHAUSTED"):
        outputs = llm.generate([[1], [2]], GREEDY, use_tqdm=False)
    assert {output.outputs[0].finish_reason for output in outputs} == {"error"}
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="RESOURCE_EXHAUSTED"):
            llm.generate([1], GREEDY, use_tqdm=False)


def test_logits_processors(text_config: ModelConfig, text_params: Any, small: dict[str, Any]) -> None:
    def only_even(logits: jax.Array, context: Any) -> jax.Array:
        return jax.numpy.where(jax.numpy.arange(logits.shape[-1]) % 2 == 0, logits, -1e30)

    llm = LLM(model_config=text_config, params=text_params, logits_processors=[only_even], **small)
    for params in (GREEDY, SamplingParams(seed=1, max_tokens=8)):
        assert all(token % 2 == 0 for token in tokens(llm, [1, 2], params))


def test_profile(llm: LLM, tmp_path: Path) -> None:
    assert llm.start_profile(tmp_path / "trace") == tmp_path / "trace"
    tokens(llm, [1])
    llm.stop_profile()
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    with pytest.raises(RuntimeError):
        llm.stop_profile()
