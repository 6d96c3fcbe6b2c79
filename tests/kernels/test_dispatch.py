"""The choice of an implementation, the self-check behind it, and the road to Pallas-Triton."""

import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec

from pallas_kernels import dispatch, self_check
from pallas_kernels.dispatch import Device, choose, current_device
from pallas_kernels.triton_call import triton_call

H200 = Device("gpu", "NVIDIA H200", (9, 0), 132)
ELSEWHERE = Device("gpu", "NVIDIA H200", (9, 0), 132, present=False)
CPU = Device("cpu", "cpu", None, 1)


def abstract(kind: str, cores: int = 108) -> Any:
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("model",), abstract_device=device))


def add_kernel(x_ref: Any, y_ref: Any, out_ref: Any, *, error: float) -> None:
    out_ref[...] = x_ref[...] + y_ref[...] + error


def add(x: jax.Array, y: jax.Array, error: float = 0.0, interpret: bool = True) -> jax.Array:
    kernel = partial(add_kernel, error=error)
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return triton_call(kernel, name="add", out_shape=shape, grid=(1,), num_warps=1, interpret=interpret)(x, y)


def check_add(implementation: str, error: float, dtype: str) -> jax.Array:
    """The kernel stands for the GPU's: on a CPU it is the interpreted one."""
    x = jnp.arange(8, dtype=dtype)
    return x + x if implementation == "reference" else add(x, x, error)


def check_that_raises(implementation: str) -> jax.Array:
    if implementation == "triton":
        raise RuntimeError("ptxas: out of registers\nmore")
    return jnp.zeros(3)


def on(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    monkeypatch.setattr(dispatch, "current_device", lambda: device)
    self_check.failure_of.cache_clear()


def refuse(device: Device) -> None:
    raise NotImplementedError(f"not on {device.kind}")


def never(implementation: str) -> jax.Array:
    raise AssertionError("no self-check may run here")


def test_the_real_device_is_found() -> None:
    device = current_device()
    assert (device.platform, device.compute_capability, device.present) == ("cpu", None, True)
    assert device.num_sms >= 1


@pytest.mark.parametrize(
    ("kind", "capability"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA A10", (8, 6)),
        ("NVIDIA GeForce RTX 4090", (8, 9)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA Unheard-Of 9000", None),
    ],
)
def test_an_abstract_device_is_what_programs_are_compiled_for(kind: str, capability: tuple[int, int] | None) -> None:
    with abstract(kind):
        assert current_device() == Device("gpu", kind, capability, 108, present=False)
    assert current_device().platform == "cpu"


def test_an_abstract_device_is_seen_inside_jit_and_shard_map() -> None:
    seen = []

    def step(x: jax.Array) -> jax.Array:
        seen.append(current_device())
        return x

    with abstract("NVIDIA H200", 132) as mesh:
        inner = jax.shard_map(step, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        jax.jit(inner).trace(jax.ShapeDtypeStruct((4,), jnp.float32))
    assert set(seen) == {ELSEWHERE}


def test_a_mesh_of_devices_that_are_here_is_real() -> None:
    with jax.set_mesh(jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert current_device().present


def test_an_explicit_choice_is_taken_unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, H200)
    for name in ("triton", "triton-interpret", "xla", "reference"):
        assert choose("op", name, check=refuse, self_check=never) == name
    with pytest.raises(ValueError, match=r"implementation='mosaic' of op .*triton-interpret, xla"):
        choose("op", "mosaic")


@pytest.mark.parametrize("device", [CPU, Device("gpu", "gfx942", None, 304), Device("gpu", "Tesla T4", (7, 5), 40)])
def test_other_devices_use_xla(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    on(monkeypatch, device)
    assert choose("op", self_check=never) == "xla"


def test_what_the_kernel_cannot_do_is_passed_on_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, H200)
    assert choose("op", check=refuse, self_check=never) == "xla"


def test_a_gpu_that_is_not_here_checks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, ELSEWHERE)
    assert choose("op", self_check=never) == "triton"


def test_a_kernel_that_passes_is_checked_once_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, H200)
    for _ in range(2):
        for dtype in ("float32", "bfloat16"):
            assert choose("add", self_check=check_add, case=(0.0, dtype)) == "triton"
    info = self_check.failure_of.cache_info()
    assert (info.misses, info.hits) == (2, 2)


def test_a_wrong_kernel_falls_back_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, H200)
    with pytest.warns(RuntimeWarning) as caught:
        for _ in range(3):
            assert choose("add", self_check=check_add, case=(0.5, "float32")) == "xla"
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "add falls back" in text and "off by 0.5" in text and "implementation='triton'" in text


def test_a_kernel_that_does_not_compile_falls_back_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, H200)
    with pytest.warns(RuntimeWarning, match=r"RuntimeError: ptxas: out of registers\. Pass"):
        assert choose("op", self_check=check_that_raises) == "xla"


@pytest.mark.parametrize("error", [0.0, 2.0])
def test_the_check_runs_while_another_function_is_traced(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Under jit, grad, vmap, shard_map and a while loop at once; the caller's trace takes no part of it."""
    on(monkeypatch, H200)
    mesh = jax.make_mesh((1,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(x: jax.Array) -> jax.Array:
        name = choose("add", self_check=check_add, case=(error, "float32"))
        return x * (2 if name == "triton" else 3)

    def loss(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 1, lambda _, y: body(y), x).sum()

    step = jax.vmap(jax.grad(loss))
    sharded = jax.shard_map(step, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = jax.jit(sharded)(jnp.ones((2, 3)))
    np.testing.assert_array_equal(got, np.full((2, 3), 3.0 if error else 2.0))
    assert len(caught) == bool(error)


def test_differences_are_named() -> None:
    x = jnp.array([1.0, 2.0, jnp.nan])
    assert self_check.difference((x, x), (x, x)) is None
    assert self_check.difference(x.at[1].add(1e-4), x) is None
    assert "off by 0.1" in str(self_check.difference(x.at[1].add(0.1), x))
    assert "NaN" in str(self_check.difference(x.at[0].set(jnp.nan), x))
    assert "off by" in str(self_check.difference(x.at[0].set(jnp.inf), x))
    seen_nothing = jnp.array([-jnp.inf, 1.0])
    assert self_check.difference(seen_nothing, seen_nothing) is None
    assert "off by 1" in str(self_check.difference(seen_nothing.at[1].set(2.0), seen_nothing))
    assert "infinities" in str(self_check.difference(seen_nothing.at[0].set(jnp.inf), seen_nothing))
    assert "bfloat16" in str(self_check.difference(x.astype(jnp.bfloat16), x))
    assert "off by 1" in str(self_check.difference(jnp.array([1, 2]), jnp.array([1, 3])))
    assert self_check.difference(jnp.zeros(0), jnp.zeros(0)) is None


def test_a_kernel_is_lowered_for_the_gpu_without_a_notice() -> None:
    """JAX 0.11 and later warn at every lowering of Pallas-Triton, and pytest makes errors of warnings here."""
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    with abstract("NVIDIA H200"):
        lowered = jax.jit(partial(add, interpret=False)).trace(shape, shape).lower(lowering_platforms=("cuda",))
    assert "triton" in lowered.as_text()


def test_notices_of_other_kernels_stay() -> None:
    """The filter covers our own kernels only."""
    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    params = plt.CompilerParams()
    call = pl.pallas_call(partial(add_kernel, error=0.0), out_shape=shape, compiler_params=params)
    with abstract("NVIDIA H200"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(partial(add, interpret=False)).trace(shape, shape).lower(lowering_platforms=("cuda",))
        assert not caught
        jax.jit(call).trace(shape, shape).lower(lowering_platforms=("cuda",))
    assert len(caught) == (jax.__version_info__ >= (0, 11))


def test_grids_that_cuda_cannot_launch_are_not_attempted() -> None:
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    with pytest.raises(NotImplementedError, match="grid=\\(1, 65536\\) of add"):
        triton_call(partial(add_kernel, error=0.0), name="add", out_shape=x, grid=(1, 65536), num_warps=1)
