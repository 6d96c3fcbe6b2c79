"""Quantised weights with prefix hits, several samples, beams, chunks, preemption and an int8 cache: outputs are those
of the plain run, and those of the same values in floats."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

from jaxinfer.quant.array import QuantArray, dequantize
from jaxinfer.quant.plan import QuantPlan, path_name
from tests.e2e.test_memory_matrix import MODEL, NUM_ROWS, SMALL_POOL, STEP, Mix, Server, check_equal

# Each in the format itself, not in what a CPU would rather multiply; half of them with an int8 cache.
PLANS = {
    "int8": (QuantPlan("int8"), "int8"),
    "int8_w8a8": (QuantPlan("int8_w8a8", head=True), "int8"),
    "fp8": (QuantPlan("fp8"), "float32"),
    "int4": (QuantPlan("int4", 32, symmetric=False), "int8"),
    "nf4": (QuantPlan("nf4", double=True), "float32"),
}
MIXES = (
    Mix(True, "n=1", NUM_ROWS, SMALL_POOL),
    Mix(True, "n=4", STEP, SMALL_POOL),
    Mix(False, "beams", STEP, SMALL_POOL),
)


def quantised(plan: QuantPlan, params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: plan.apply(path_name(path), leaf, "float32"), params)


def in_floats(params: Any) -> Any:
    def is_quantised(leaf: Any) -> bool:
        return isinstance(leaf, QuantArray)

    return jax.tree.map(lambda leaf: dequantize(leaf) if is_quantised(leaf) else leaf, params, is_leaf=is_quantised)


SLOW = ("int8_w8a8", "fp8", "int4", "nf4")
METHODS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PLANS]


@pytest.fixture(scope="module", params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(method: str, random_params: Callable[..., Any]) -> Iterator[Server]:
    plan, kv_dtype = PLANS[method]
    made = Server(kv_dtype, quantised(plan, random_params(MODEL)))
    yield made
    assert made.runner.num_compiled <= 3


@pytest.fixture(scope="module")
def float_servers(random_params: Callable[..., Any]) -> dict[str, Server]:
    return {kv_dtype: Server(kv_dtype, random_params(MODEL)) for kv_dtype in ("int8", "float32")}


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: mix.kind)
def test_outputs_are_those_of_the_plain_run(server: Server, mix: Mix) -> None:
    served = server.serve(mix)
    check_equal(served.outputs, server.plain(mix.kind))
    assert served.outputs[0].num_cached_tokens == (16 if mix.hit else 0)
    assert served.engine.stats().num_preemptions > 0 or mix.kind == "n=1"


def test_outputs_are_those_of_the_same_values_in_floats(
    server: Server, method: str, float_servers: dict[str, Server], random_params: Callable[..., Any]
) -> None:
    if method == "int8_w8a8":
        return  # it rounds activations, too
    plan, kv_dtype = PLANS[method]
    floats = float_servers[kv_dtype]
    floats._plain.clear()
    floats.runner.update_params(in_floats(quantised(plan, random_params(MODEL))))
    quantised_ids, float_ids = (
        [output.outputs[0].token_ids for output in made.plain("n=1")] for made in (server, floats)
    )
    assert quantised_ids == float_ids
    if method != "int8":  # there a CPU has 15 bits of activations
        check_equal(server.plain("n=1"), floats.plain("n=1"))
