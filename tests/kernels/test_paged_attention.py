"""The paged attention operation around its numbers: choice, work lists, refusals, named shapes, the XLA tiles."""

import itertools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import IMPLEMENTATIONS, Device
from pallas_kernels.kv_format import FORMATS, KVFormat, format_of
from pallas_kernels.paged_attention import WorkList, api, make_work_list, paged_attention
from pallas_kernels.paged_attention.cases import (
    AXES,
    MODELS,
    AttentionShape,
    abstract_operands,
    make_operands,
    pairwise_shapes,
)
from pallas_kernels.paged_attention.work_list import Tiles, make_tiles

SMALL = AttentionShape(4, 2, 16, dtype="float32", pages_dtype="float32")
ROWS = [(1, 129), (1, 1), (3, 17), (17, 17), (20, 90)]
HOPPER = Device("gpu", "NVIDIA H200", (9, 0), 132, present=False)
AMPERE = Device("gpu", "NVIDIA A100-SXM4-80GB", (8, 0), 108, present=False)

attend = jax.jit(paged_attention, static_argnames=("implementation", "window"))


def list_for(ops: dict[str, Any], **changes: Any) -> WorkList:
    arguments: dict[str, Any] = {"num_tokens": ops["q"].shape[0], "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    return make_work_list(ops["query_start"], ops["context_lens"], **{**arguments, **changes})


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Bit for bit."""
    together = make_operands(SMALL, [(1, 7 * i + 1) for i in range(20)], num_tokens=32, num_rows=32)
    out = np.asarray(attend(**together, implementation="xla"))
    for row in (0, 7, 19):
        alone = {
            **together,
            "query_start": jnp.ones(33, jnp.int32).at[0].set(0),
            "q": jnp.roll(together["q"], -row, axis=0),
            "block_tables": jnp.roll(together["block_tables"], -row, axis=0),
            "context_lens": jnp.zeros(32, jnp.int32).at[0].set(together["context_lens"][row]),
        }
        np.testing.assert_array_equal(attend(**alone, implementation="xla")[0], out[row])


@pytest.mark.parametrize("window", [None, 20])
def test_tiles_name_every_token_once_and_come_in_the_order_of_what_they_see(window: int | None) -> None:
    ops = make_operands(SMALL, ROWS, num_tokens=64, num_rows=8)
    made = make_tiles(ops["query_start"], ops["context_lens"], 64, window)
    found: list[int] = []
    for tiles in jax.tree.leaves(made, is_leaf=lambda part: isinstance(part, Tiles)):
        count, sees = int(tiles.num_tiles), []
        assert not np.asarray(tiles.valid)[count:].any()
        for row, tokens, exists in zip(*(np.asarray(field)[:count] for field in tiles[:3]), strict=True):
            positions = ROWS[row][1] - int(ops["query_start"][row + 1]) + tokens[exists]
            low = 0 if window is None else max(positions[0] - window + 1, 0)
            sees.append(positions[-1] + 1 - low)
            found += tokens[exists].tolist()
        assert sees == sorted(sees, reverse=True)
    assert sorted(found) == list(range(sum(new for new, _ in ROWS)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_format", [None, *FORMATS], ids=lambda kv_format: kv_format.name if kv_format else "float")
def test_the_pool_is_neither_copied_nor_converted(kv_format: KVFormat | None, dtype: str) -> None:
    shape = replace(SMALL, dtype=dtype, pages_dtype=str(kv_format.dtype) if kv_format else dtype)
    ops = abstract_operands(shape, num_tokens=24, num_rows=8, pages_per_row=32, num_pages=50_000)
    memory = attend.lower(**ops, implementation="xla").compile().memory_analysis()
    assert memory.temp_size_in_bytes < ops["pages"].size / 8


@pytest.mark.parametrize("window", [2**31 - 1, 2**40])
def test_a_window_wider_than_32_bits_count_hides_nothing(window: int) -> None:
    """Twenty tiles of several tokens: more than are attended together, and room for as many more."""
    ops = make_operands(SMALL, [(3, 3 + row) for row in range(20)], num_tokens=256)
    work = list_for(ops, window=window, implementation="xla")
    everything = attend(**ops, implementation="xla")
    np.testing.assert_array_equal(attend(**ops, window=window, implementation="xla"), everything)
    np.testing.assert_array_equal(attend(**ops, window=window, work_list=work), everything)


@pytest.mark.parametrize("num_tokens", [8, 64])
def test_the_kernel_s_plan_names_rows_that_exist(num_tokens: int) -> None:
    """Of padding tokens, too: the kernel reads a row's numbers before it knows that there is nothing to see."""
    rows = [(1, 5)] * 4 if num_tokens == 8 else [(20, 30), (1, 5)]
    ops = make_operands(SMALL, rows, num_tokens=num_tokens, num_rows=8)
    plan = list_for(ops, implementation="triton-interpret").plan
    for tiles in (plan.short, plan.long) if plan.long is not None else (plan.short,):
        items = np.asarray(tiles.items)
        assert items[items[:, 2] > 0, 0].max() < 8


@pytest.mark.parametrize("implementation", [name for name in IMPLEMENTATIONS if name != "triton"])
def test_the_list_s_maker_attends(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever made the list explicitly has chosen."""
    ops = make_operands(SMALL, [(1, 3), (2, 2)])
    used = record_choices(monkeypatch)
    paged_attention(**ops, work_list=list_for(ops, implementation=implementation))
    assert used == [implementation]


def record_choices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the implementations by ones that only say their names."""
    used: list[str] = []

    def fake(name: str) -> Any:
        def run(q: jax.Array, *_: Any, interpret: bool = False, **__: Any) -> jax.Array:
            used.append(f"{name}-interpret" if interpret else name)
            return q

        return run

    for name in ("reference", "xla", "triton"):
        monkeypatch.setattr(api, f"paged_attention_{name}", fake(name))
    return used


@pytest.mark.parametrize(
    ("device", "shape", "expected"),
    [
        (Device("cpu", "cpu", None, 1), SMALL, "xla"),
        (HOPPER, SMALL, "triton"),
        (HOPPER, replace(SMALL, num_heads=40), "xla"),
        (AMPERE, replace(SMALL, pages_dtype="float8_e5m2"), "triton"),
    ],
    ids=["cpu", "gpu", "group of 20", "e5m2 on ampere"],
)
@pytest.mark.parametrize("with_list", [False, True])
def test_the_device_chooses(
    device: Device, shape: AttentionShape, expected: str, with_list: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pallas_kernels.dispatch.current_device", lambda: device)
    ops = make_operands(shape, [(1, 3), (2, 2)])
    used = record_choices(monkeypatch)
    work = list_for(ops, num_heads=shape.num_heads) if with_list else None
    paged_attention(**ops, work_list=work)
    assert used == [expected]


def test_a_list_for_a_kernel_that_cannot_do_the_pool_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: Device, *, pages_dtype: Any, **_: Any) -> None:
        if pages_dtype == jnp.int8:
            raise NotImplementedError("int8")

    monkeypatch.setattr("pallas_kernels.dispatch.current_device", lambda: HOPPER)
    monkeypatch.setattr(api, "check_triton", refuse)
    ops = make_operands(replace(SMALL, pages_dtype="int8"), [(1, 3), (2, 2)])
    work = list_for(ops)
    assert work.implementation == "triton"
    out = paged_attention(**ops, work_list=work)
    np.testing.assert_array_equal(out, paged_attention(**ops, implementation="xla"))


def test_the_self_check_fits_every_format() -> None:
    """What a GPU runs once before it trusts the kernel: here that it traces, and gives numbers that differ from 0."""
    case = ("bfloat16", 4, 64, 16, True, True)
    for pages_dtype in ("bfloat16", *(str(kv_format.dtype) for kv_format in FORMATS)):
        for tree in (False, True):
            arguments = (case[0], pages_dtype, *case[1:], tree)
            shapes = [jax.eval_shape(lambda n=n, a=arguments: api._self_check(n, *a)) for n in ("reference", "xla")]
            assert shapes[0] == shapes[1]
    out = jax.jit(lambda: api._self_check("xla", "float32", "int8", 2, 16, 16, True, True, False))()
    assert np.isfinite(out).all() and np.abs(out).max() > 0.1


@pytest.mark.parametrize("implementation", ["reference", "xla", "triton-interpret"])
def test_steps_without_tokens_or_rows(implementation: str) -> None:
    ops = make_operands(SMALL, [(1, 3), (2, 2)])
    assert attend(**{**ops, "q": ops["q"][:0]}, implementation=implementation).shape == (0, 4, 16)
    empty = {
        "block_tables": ops["block_tables"][:0],
        "query_start": ops["query_start"][:1],
        "context_lens": ops["context_lens"][:0],
    }
    assert not np.asarray(attend(**{**ops, **empty}, implementation=implementation)).any()


INT8 = {"pages": jnp.zeros((3, 4, 16, 16), jnp.int8)}
BAD = {
    "q without heads": ({"q": jnp.zeros((3, 64))}, "q(3, 64) must be [T, N, H]"),
    "another head dim": ({"q": jnp.zeros((3, 4, 8))}, "with the same H (H / 2 bytes for int4)"),
    "int4 of another head dim": (
        {"pages": jnp.zeros((3, 4, 16, 16), jnp.uint8), "scales": jnp.ones((3, 4, 16))},
        "pages uint8(3, 4, 16, 16) [P, 2K, S, H] with the same H (H / 2 bytes for int4)",
    ),
    "heads that do not divide": ({"q": jnp.zeros((3, 5, 16))}, "2K with K dividing the 5 query heads"),
    "values missing": ({"pages": jnp.zeros((3, 3, 16, 16))}, "axis 1 must be 2K"),
    "rows that differ": ({"context_lens": jnp.ones(1, jnp.int32)}, "context_lens(1,) [B]"),
    "starts that differ": ({"query_start": jnp.zeros(2, jnp.int32)}, "query_start(2,) [B + 1]"),
    "float ids": ({"block_tables": jnp.zeros((2, 1))}, "block_tables is float32; it must be int32"),
    "a wide dtype": ({"q": np.zeros((3, 4, 16), np.float64)}, "q is float64; it must be one of float32"),
    "a pool of another float": ({"q": jnp.zeros((3, 4, 16), jnp.bfloat16)}, "pages are float32 but q is bfloat16"),
    "no such format": ({"pages": jnp.zeros((3, 4, 16, 16), jnp.int16)}, "pages dtype int16 is no page format"),
    "scales not wanted": ({"scales": jnp.ones((3, 4, 16))}, "scales(3, 4, 16) were given for float32 pages"),
    "scales missing": (INT8, "scales=None, but int8 pages hold int8 codes: give float32(3, 4, 16)"),
    "scales misshapen": ({**INT8, "scales": jnp.ones((3, 4))}, "scales float32(3, 4) must be float32(3, 4, 16)"),
    "scales of halves": ({**INT8, "scales": jnp.ones((3, 4, 16), jnp.float16)}, "scales float16(3, 4, 16) must be"),
    "window 0": ({"window": 0}, "window=0 must be an int of at least 1"),
    "window of a float": ({"window": 2.5}, "window=2.5 must be an int"),
    "window true": ({"window": True}, "window=True must be an int"),
    "softcap 0": ({"softcap": 0.0}, "softcap=0.0 must be a number above 0, or None"),
    "softcap nan": ({"softcap": float("nan")}, "softcap=nan must be a number above 0"),
    "scale nan": ({"scale": float("nan")}, "scale=nan must be a finite number"),
    "tree of floats": ({"tree_mask": jnp.ones((3, 2))}, "tree_mask float32(3, 2) must be bool [T, Qmax] with T=3"),
    "tree of other tokens": ({"tree_mask": jnp.ones((2, 2), bool)}, "tree_mask bool(2, 2) must be bool [T, Qmax]"),
    "no implementation": ({"implementation": "cuda"}, "implementation='cuda' of paged_attention must be one of triton"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    ops = make_operands(SMALL, [(1, 3), (2, 2)])
    with pytest.raises(ValueError, match=re.escape(message)):
        paged_attention(**{**ops, **changes})


def test_a_list_of_another_step_is_refused() -> None:
    ops = make_operands(SMALL, [(1, 3), (2, 2)])
    with pytest.raises(ValueError, match="work_list is for num_tokens=3 and window=None, not for 3 and 7"):
        paged_attention(**ops, window=7, work_list=list_for(ops))
    with pytest.raises(ValueError, match="work_list is for num_tokens=4"):
        paged_attention(**ops, work_list=list_for(ops, num_tokens=4))
    with pytest.raises(ValueError, match="made for implementation='xla', not 'triton-interpret'"):
        paged_attention(**ops, work_list=list_for(ops), implementation="triton-interpret")
    with pytest.raises(ValueError, match="num_heads=5 must be a multiple of num_kv_heads=2"):
        list_for(ops, num_heads=5)
    with pytest.raises(ValueError, match="window=0"):
        list_for(ops, window=0)
    with pytest.raises(ValueError, match=re.escape("query_start(2,) must have one entry more than context_lens(2,)")):
        list_for({**ops, "query_start": ops["query_start"][:2]})


def test_every_two_values_of_different_axes_meet() -> None:
    shapes = pairwise_shapes()
    assert len(shapes) < 40

    def has(shape: AttentionShape, axis: str, value: Any) -> bool:
        if axis == "kv_format":
            kv_format = format_of(shape.pages_dtype)
            return (kv_format.name if kv_format else None) == value
        return bool(getattr(shape, axis) == value)

    for (one, values), (other, others) in itertools.combinations(AXES.items(), 2):
        for value, met in itertools.product(values, others):
            assert any(has(shape, one, value) and has(shape, other, met) for shape in shapes), (one, value, other, met)


@pytest.mark.parametrize("name", MODELS)
def test_models_can_be_attended(name: str) -> None:
    shape = MODELS[name]
    ops = abstract_operands(shape, num_tokens=64, num_rows=8, pages_per_row=32, num_pages=100)
    out = jax.eval_shape(lambda ops: paged_attention(**ops, **shape.options, implementation="xla"), ops)
    assert out.shape == (64, shape.num_heads, shape.head_dim) and out.dtype == shape.dtype
