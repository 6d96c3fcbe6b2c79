"""What an engine can do, done by one that is split over devices: as by one on a single device."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxinfer import LLM, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.sharding.placement import Placement
from jaxinfer.sharding.shards import shards_of

Make = Callable[..., ModelConfig]


@pytest.fixture(scope="module")
def model(small_model: Make) -> ModelConfig:
    return small_model(intermediate_size=64, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def params(model: ModelConfig, random_tree: Callable[..., Any]) -> Any:
    return random_tree(model)


@pytest.fixture(scope="module")
def laid_out(model: ModelConfig, params: Any) -> Any:
    """The parameters on a caller's mesh of 2 x 2 devices, split over its second axis as an engine has them."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), devices=jax.devices()[2:6])
    shards = shards_of(model, Placement(mesh=mesh, axis="tensor"))
    specs = shards.tree_specs(params)
    padded = params | {"embed": {"embedding": np.pad(params["embed"]["embedding"], ((0, 1), (0, 0)))}}
    tree = jax.tree.map(lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), padded, specs)
    return mesh, tree | {"embed": {"embedding": jax.device_put(params["embed"]["embedding"])}}


@pytest.fixture(scope="module")
def llm(model: ModelConfig, laid_out: Any, small: dict[str, Any]) -> Iterator[LLM]:
    """On the caller's mesh, with a pool of int8 and small blocks."""
    mesh, tree = laid_out
    options = {"mesh": mesh, "axis_names": ("tensor",), "kv_cache_dtype": "int8", "block_size": 4}
    with LLM(model_config=model, params=tree, **small | options) as made:
        yield made


@pytest.fixture(scope="module")
def expected(model: ModelConfig, params: Any, served: Callable[..., Any]) -> Any:
    """What an engine on one device says."""
    return served(model, params, kv_cache_dtype="int8", block_size=4)


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def test_arrays_on_the_callers_mesh_are_used_where_they_lie(
    llm: LLM, laid_out: Any, answers: Callable[..., Any], same: Callable[..., None], expected: Any
) -> None:
    _, tree = laid_out
    leaves = {id(leaf) for leaf in llm._parts._replicas[0].runner.leaves}
    found = [id(leaf) in leaves for leaf in jax.tree.leaves(tree)]
    assert found.count(False) == 1  # 131 rows of the table had to become 132
    same(answers(llm), expected)


def test_a_prefix_is_found_again(llm: LLM) -> None:
    """Twice the same: the second time its two full blocks are there, and the answer is the same."""
    prompt, greedy = {"prompt_token_ids": [9, 8, 7, 6, 5, 4, 3, 2, 1]}, SamplingParams(temperature=0, max_tokens=4)
    first, second = (llm.generate([prompt], greedy, use_tqdm=False)[0] for _ in range(2))
    assert first.num_cached_tokens == 0 and second.num_cached_tokens == 8
    assert first.outputs[0].token_ids == second.outputs[0].token_ids


def test_new_parameters_are_taken_without_a_copy_or_a_compilation(
    llm: LLM, laid_out: Any, answers: Callable[..., Any], same: Callable[..., None], expected: Any, caplog: Any
) -> None:
    _, tree = laid_out
    runner = llm._parts._replicas[0].runner
    same(answers(llm), expected)
    compiled = runner.num_compiled
    doubled = jax.tree.map(lambda leaf: leaf * 2, tree)
    with caplog.at_level(logging.INFO, "jaxinfer"):
        llm.update_params(doubled)
    assert "1 of 8 parameters were laid out anew" in caplog.text
    changed = answers(llm)
    assert changed[0][1] != expected[0][1]
    qkv = doubled["layers_0"]["attn"]["qkv"]["kernel"]
    assert pointers(qkv) in [pointers(leaf) for leaf in runner.leaves]
    llm.update_params(tree)
    same(answers(llm), expected)
    assert runner.num_compiled == compiled


def test_arrays_that_have_to_be_laid_out_anew_are_by_the_same_programs(model: ModelConfig, params: Any) -> None:
    """Two KV heads on four devices, 131 rows of the table: neither another tree nor another layer compiles anything."""
    tree = jax.tree.map(jax.numpy.asarray, params)
    mesh = jax.make_mesh((4,), ("model",), devices=jax.devices()[:4])
    shards = shards_of(model, Placement(mesh=mesh, axis="model"))
    compiled: list[str] = []

    def count(event: str, duration_secs: float, **details: str | int) -> None:
        compiled.extend([event] * event.endswith("backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        first = shards.put_tree(tree)
        before = len(compiled)
        again = shards.put_tree(tree)
        other_layer = shards.put("layers_1/attn/qkv/kernel", tree["layers_0"]["attn"]["qkv"]["kernel"])
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert before and len(compiled) == before
    assert other_layer.sharding == first["layers_0"]["attn"]["qkv"]["kernel"].sharding
    for one, other in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)


def test_sleep_and_forks_change_nothing(
    llm: LLM, answers: Callable[..., Any], same: Callable[..., None], expected: Any
) -> None:
    llm.sleep(level=1)
    llm.wake_up()
    same(answers(llm), expected)
    prompt = {"prompt_token_ids": [7, 3, 90, 41, 5, 6]}
    several = SamplingParams(temperature=1, seed=4, n=2, max_tokens=6, ignore_eos=True)
    first, second = (llm.generate([prompt], several, use_tqdm=False)[0].outputs for _ in range(2))
    assert [each.token_ids for each in first] == [each.token_ids for each in second]
    assert first[0].token_ids != first[1].token_ids


@pytest.mark.parametrize(
    "arguments",
    [{"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}],
    ids=["cut", "dealt out"],
)
def test_experts(
    arguments: Any,
    small_model: Make,
    random_tree: Callable[..., Any],
    served: Callable[..., Any],
    same: Callable[..., None],
) -> None:
    """Five experts on two devices, beside a shared one."""
    sizes = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 13}
    config = small_model(**sizes, shared_expert_intermediate_size=20)
    params = random_tree(config)
    same(served(config, params, **arguments), served(config, params))


def test_experts_need_a_model_that_has_some(model: ModelConfig, params: Any) -> None:
    with pytest.raises(ValueError, match="enable_expert_parallel=True needs a model with experts"):
        LLM(model_config=model, params=params, tensor_parallel_size=2, enable_expert_parallel=True)


QUANTISED = [
    {"quantization": "int8"},
    {"quantization": "int8_w8a8"},
    {"quantization": "int4", "quantization_config": {"symmetric": False, "fast_form": False}},
    {"quantization": "nf4", "quantization_config": {"double_quant": True, "fast_form": False}},
]


@pytest.mark.parametrize(
    "arguments",
    [*QUANTISED[:2], *(pytest.param(each, marks=pytest.mark.slow) for each in QUANTISED[2:])],
    ids=[each["quantization"] for each in QUANTISED],
)
def test_quantised_weights(
    arguments: Any,
    small_model: Make,
    random_tree: Callable[..., Any],
    served: Callable[..., Any],
    same: Callable[..., None],
) -> None:
    """Also W8A8, whose rows are rotated in blocks of 64 and rounded with one scale for both devices. 96 channels make
    groups of 32 that two equal parts would cut."""
    config = small_model(intermediate_size=96, head_dim=16)
    params = random_tree(config)
    same(served(config, params, tensor_parallel_size=2, **arguments), served(config, params, **arguments))


def test_drafts(
    model: ModelConfig, params: Any, random_tree: Callable[..., Any], served: Callable[..., Any], small_model: Make
) -> None:
    """Greedy tokens are those of plain decoding, with n-grams and with a draft model that lies whole on each device."""
    draft = small_model(hidden_size=16, num_attention_heads=3, num_key_value_heads=3, intermediate_size=10)
    plain = served(model, params, answer={"logprobs": None})
    for method in (
        {"method": "ngram", "num_speculative_tokens": 2},
        {"model_config": draft, "params": random_tree(draft), "num_speculative_tokens": 2},
    ):
        found = served(model, params, answer={"logprobs": None}, tensor_parallel_size=2, speculative_config=method)
        assert [ids for ids, _ in found] == [ids for ids, _ in plain]


def test_replicas_that_are_split(
    model: ModelConfig, params: Any, served: Callable[..., Any], same: Callable[..., None], expected: Any
) -> None:
    options = {"kv_cache_dtype": "int8", "block_size": 4}
    same(served(model, params, data_parallel_size=2, tensor_parallel_size=2, **options), expected)


def test_a_checkpoint_is_dealt_out_as_it_is_read(
    write_checkpoint: Callable[..., Any],
    small_model: Make,
    random_tree: Callable[..., Any],
    small: Any,
    answers: Any,
    same: Any,
) -> None:
    config = small_model(vocab_size=258, max_position_embeddings=64)
    params = random_tree(config)
    path = write_checkpoint(config, params)
    with LLM(str(path), tensor_parallel_size=4, **small) as llm:
        kernels = {leaf.sharding.spec for leaf in llm._parts._replicas[0].runner.leaves}  # type: ignore[attr-defined]
        assert len(kernels) > 2
        found = answers(llm)
    with LLM(str(path), **small) as llm:
        same(found, answers(llm))


def test_which_axis_of_a_mesh() -> None:
    from jaxinfer.startup.devices import mesh_placement

    mesh = jax.make_mesh((2, 4), ("data", "model"), devices=jax.devices()[:8])
    assert mesh_placement(mesh, "model").num_parts == 4 and mesh_placement(mesh, ("data",)).num_parts == 2
    with pytest.raises(ValueError, match="axis_names=None: the mesh has several axes .*axis_names=\\('model',\\)"):
        mesh_placement(mesh, None)
    with pytest.raises(ValueError, match="axis_names='heads' must name one axis of the mesh"):
        mesh_placement(mesh, "heads")
    with pytest.raises(ValueError, match="tensor_parallel_size=2 contradicts the mesh, whose axis 'model' has 4"):
        mesh_placement(mesh, "model", 2)
    single = jax.make_mesh((1,), ("model",), devices=jax.devices()[:1])
    assert mesh_placement(single, None).mesh is None  # plain jit
