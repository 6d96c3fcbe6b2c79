"""Ragged paged attention compiled to the end for GPUs that are not here: launches, memory, registers, shared memory."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.planning.deviceless import DevicelessReport, compile_for, gpu_target
from pallas_kernels.paged_attention import make_work_list, paged_attention

MIB = 1 << 20
BFLOAT16: Any = jnp.dtype(jnp.bfloat16)


@dataclass(frozen=True)
class Case:
    """Shapes of a step; a Llama-3-8B layer by default."""

    num_tokens: int = 32
    num_rows: int = 32
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: Any = BFLOAT16
    pages: Any = BFLOAT16
    page_size: int = 16
    num_pages: int = 8192
    window: int | None = None
    softcap: float | None = None
    tree: int = 0


def compile_case(gpu: str, case: Case) -> DevicelessReport:
    """Two layers that share a work list, by the implementation that dispatch chooses."""
    shape = jax.ShapeDtypeStruct
    quantized = case.pages != case.dtype
    width = case.head_dim // (2 if case.pages == jnp.uint8 else 1)
    pool = (case.num_pages, 2 * case.num_kv_heads, case.page_size)

    def layers(
        q: jax.Array,
        pages: jax.Array,
        tables: jax.Array,
        starts: jax.Array,
        contexts: jax.Array,
        scales: jax.Array | None,
        tree: jax.Array | None,
    ) -> jax.Array:
        work = make_work_list(
            starts,
            contexts,
            num_tokens=case.num_tokens,
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            window=case.window,
        )
        for _ in range(2):
            q = paged_attention(
                q,
                pages,
                tables,
                starts,
                contexts,
                scales=scales,
                window=case.window,
                softcap=case.softcap,
                tree_mask=tree,
                work_list=work,
            )
        return q

    return compile_for(
        gpu_target(gpu),
        jax.jit(layers),
        shape((case.num_tokens, case.num_heads, case.head_dim), case.dtype),
        shape((*pool, width), case.pages),
        shape((case.num_rows, 512), jnp.int32),
        shape((case.num_rows + 1,), jnp.int32),
        shape((case.num_rows,), jnp.int32),
        shape(pool, jnp.float32) if quantized else None,
        shape((case.num_tokens, case.tree), jnp.bool_) if case.tree else None,
    )


def launches(report: DevicelessReport) -> list[str]:
    """The kernels of attention, in order, without their common prefix."""
    prefix = "paged_attention_"
    return [launch.name.removeprefix(prefix) for launch in report.launches if launch.name.startswith(prefix)]


def assert_fits(report: DevicelessReport, gpu: str) -> None:
    kernels = [kernel for kernel in report.kernels if kernel.name.startswith("paged_attention")]
    for kernel in kernels:
        print(
            f"{gpu:9}{kernel.name:24}{kernel.registers:4} registers, {kernel.spill_bytes} bytes spilled, "
            f"{kernel.shared_bytes} bytes shared, {kernel.threads} threads, temp {report.temp_bytes / MIB:.1f} MiB"
        )
    assert kernels
    assert all(kernel.spill_bytes == 0 for kernel in kernels)
    assert all(kernel.shared_bytes <= gpu_target(gpu).spec.shared_memory_per_block for kernel in kernels)
    assert report.num_command_buffers == 1
    assert not report.launches_outside_graphs()


DECODES = {
    "bfloat16": Case(),
    "int8": Case(pages=jnp.dtype(jnp.int8)),
    "e4m3": Case(pages=jnp.dtype(jnp.float8_e4m3fn)),
    "int4, groups of 7, 80 wide, window": Case(
        num_heads=28, num_kv_heads=4, head_dim=80, pages=jnp.dtype(jnp.uint8), page_size=32, window=4096
    ),
    "256 wide, soft cap": Case(num_heads=16, head_dim=256, softcap=50.0, page_size=64),
    "multi-query, e5m2, float16": Case(
        num_heads=16, num_kv_heads=1, head_dim=64, dtype=jnp.dtype(jnp.float16), pages=jnp.dtype(jnp.float8_e5m2)
    ),
    "multi-head, float32, 96 wide": Case(
        num_kv_heads=32, head_dim=96, dtype=jnp.dtype(jnp.float32), pages=jnp.dtype(jnp.float32), page_size=128
    ),
}
PREFILLS = {
    "bfloat16": Case(num_tokens=2048),
    "a short chunk": Case(num_tokens=256, num_rows=8),
    "int8": Case(num_tokens=2048, pages=jnp.dtype(jnp.int8)),
    "int4, 64 wide, window": Case(num_tokens=2048, head_dim=64, pages=jnp.dtype(jnp.uint8), window=1024),
    "256 wide, window, soft cap": Case(
        num_tokens=2048, num_heads=8, num_kv_heads=4, head_dim=256, window=4096, softcap=50
    ),
    "e4m3, 80 wide": Case(num_tokens=2048, head_dim=80, pages=jnp.dtype(jnp.float8_e4m3fn)),
    "groups of 7": Case(num_tokens=2048, num_heads=28, num_kv_heads=4),
    "tree": Case(num_tokens=512, tree=16),
}


def on_each_gpu(cases: dict[str, Case], everywhere: tuple[str, ...]) -> Any:
    """All cases on an H200, those named `everywhere` on an A100 and an RTX 4090 too, and the first on an H100."""
    pairs = [("h200", name) for name in cases]
    pairs += [(gpu, name) for gpu in ("a100-80g", "rtx4090") for name in everywhere]
    pairs += [("h100", next(iter(cases)))]
    return pytest.mark.parametrize(
        ("target", "case"), [pytest.param(gpu, cases[name], id=f"{gpu}, {name}") for gpu, name in pairs]
    )


@on_each_gpu(DECODES, ("bfloat16", "int8", "e4m3", "256 wide, soft cap", "multi-head, float32, 96 wide"))
def test_decode_is_two_launches_a_layer(target: str, case: Case) -> None:
    report = compile_case(target, case)
    assert launches(report) == ["short", "merge"] * 2
    assert_fits(report, target)
    # Partial results of split contexts; the pool, of 256 MiB and more, is not copied.
    assert report.temp_bytes < 16 * MIB
    if case == Case():
        assert report.temp_bytes < 8 * MIB


@on_each_gpu(
    PREFILLS, ("bfloat16", "int8", "int4, 64 wide, window", "256 wide, window, soft cap", "groups of 7", "tree")
)
def test_a_wider_step_is_three_launches_a_layer(target: str, case: Case) -> None:
    report = compile_case(target, case)
    assert launches(report) == ["long", "short", "merge"] * 2
    assert_fits(report, target)
    assert report.temp_bytes < 80 * MIB


def test_a_pool_beyond_4_gib_takes_64_bits() -> None:
    report = compile_case("h200", Case(num_pages=(9 << 30) // (16 * 16 * 128 * 2)))
    assert launches(report) == ["short", "merge"] * 2
    assert_fits(report, "h200")


@pytest.mark.parametrize("pages", [jnp.int8, jnp.float8_e4m3fn, jnp.uint8])
def test_a_pool_of_bytes_beyond_2_gib_is_read_in_pairs(pages: Any) -> None:
    """Without a copy: Pallas would count bytes in 32 bits up to 4 GiB, and Triton take those for signed."""
    num_pages = (3 << 30) // (16 * 16 * (64 if pages == jnp.uint8 else 128))
    report = compile_case("h200", Case(num_pages=num_pages, pages=jnp.dtype(pages)))
    assert launches(report) == ["short", "merge"] * 2
    assert_fits(report, "h200")
    assert report.temp_bytes < 8 * MIB
    assert "s16[" in report.hlo
