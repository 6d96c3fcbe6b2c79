"""Where a program makes 64 bits JAX's default, the kernels still count in 32, and give what they give elsewhere."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.block_copy import block_copy
from pallas_kernels.flash_attention import flash_attention
from pallas_kernels.gated_matmul import norm_gated_matmul
from pallas_kernels.kv_write import api, kv_write, rope_kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.cases import AttentionShape, abstract_operands
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.self_check import difference

Shape = jax.ShapeDtypeStruct

ROWS = Shape((3, 2, 64), jnp.bfloat16)
PLACES = Shape((3,), jnp.int32)
ATTENTION = AttentionShape(8, 2, 64, pages_dtype="int8", window=20, softcap=3.0, tree=True)
POOL, SCALES = Shape(ATTENTION.pages_shape(9), jnp.int8), Shape((9, 4, 16), jnp.float32)


def attention_gradients(q: jax.Array, k: jax.Array) -> Any:
    return jax.grad(lambda q: jnp.sum(jnp.asarray(flash_attention(q, k, k, causal=True)), dtype=jnp.float32))(q)


OPERATIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "kv_write": (kv_write, (ROWS, ROWS, POOL, PLACES, PLACES)),
    "rope_kv_write": (
        rope_kv_write,
        (Shape((3, 2, 6, 64), jnp.bfloat16), *[Shape((3, 32), jnp.float32)] * 2, POOL, PLACES, PLACES),
    ),
    "block_copy": (block_copy, (POOL, PLACES, PLACES)),
    "norm_gated_matmul": (
        partial(norm_gated_matmul, epsilon=1e-5, activation="silu"),
        (Shape((3, 64), jnp.bfloat16), Shape((64,), jnp.bfloat16), Shape((2, 32, 64), jnp.bfloat16)),
    ),
    "quantized_matmul": (
        partial(quantized_matmul, bits=4, group=32),
        (Shape((3, 64), jnp.bfloat16), Shape((8, 32), jnp.uint8), Shape((8, 2), jnp.float32)),
    ),
    "flash_attention": (
        attention_gradients,
        (Shape((1, 40, 4, 64), jnp.bfloat16), Shape((1, 40, 2, 64), jnp.bfloat16)),
    ),
}


def lower_for_a_gpu(function: Any, *arguments: Any, **named: Any) -> str:
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("model",), abstract_device=device)), jax.enable_x64(True):
        return jax.jit(function).trace(*arguments, **named).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", OPERATIONS)
def test_kernels_are_lowered(name: str) -> None:
    function, arguments = OPERATIONS[name]
    named = {"scales": SCALES} if POOL in arguments else {}
    assert name in lower_for_a_gpu(function, *arguments, **named)


def test_paged_attention_is_lowered() -> None:
    operands = abstract_operands(ATTENTION, num_tokens=40, num_rows=2, pages_per_row=4, num_pages=9)
    text = lower_for_a_gpu(lambda operands: paged_attention(**operands, **ATTENTION.options), operands)
    assert "paged_attention_long" in text and "paged_attention_merge" in text


def test_the_interpreted_kernel_and_its_self_check_work() -> None:
    with jax.enable_x64(True):
        got, want = (
            jax.jit(partial(api._check_kv_write, name, "float32", "int8", 8))()
            for name in ("triton-interpret", "reference")
        )
    assert difference(got, want) is None
    assert np.asarray(want).any()
