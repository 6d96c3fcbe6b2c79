"""Stage `decode_step`: jaxinfer's own step program on a model shaped like Llama-3-8B, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.cache.paged import KVCache, LayerCache, kv_cache_shapes
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.runner.inputs import StepSpec, packed_size, unpack
from jaxinfer.runner.programs import GPU_OPTIONS
from jaxinfer.runner.step import make_forward_step
from jaxinfer.sampling.state import init_state
from scripts.gpu_checks.case import Case, CheckFailed, Compiled, Program
from scripts.gpu_checks.pools import random_tables, random_values
from scripts.gpu_checks.scanned_step import make_scanned_step, stacked_shapes
from scripts.gpu_checks.session import Session

LLAMA_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=5e5,
)
TINY = ModelConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
BLOCK_SIZE = 16
SAMPLE_SECONDS = 0.1
OPTIONS: dict[str, dict[str, bool | int | str]] = {
    "": {},
    "no graphs": {"xla_gpu_enable_command_buffer": ""},
    "XLA's products": {"xla_gpu_enable_triton_gemm": True},
    "scanned": {},
}
"""XLA's options of each variant, beside those of the engine."""

TRITON_CALL = '"__gpu$xla.gpu.triton"'


@dataclass(frozen=True)
class Step:
    """B rows that each have `context` positions and get one more token.

    `variant` is one of `OPTIONS`: "" for the program that the engine runs, without CUDA graphs, with the products that
    XLA writes and tunes in place of cuBLAS's, or with scanned layers.
    """

    config: ModelConfig
    rows: int
    context: int
    variant: str = ""

    @property
    def name(self) -> str:
        return f"batch {self.rows}, context {self.context}" + (f", {self.variant}" if self.variant else "")

    @property
    def spec(self) -> StepSpec:
        """The engine's bucket."""
        width = -(-self.context // BLOCK_SIZE)
        return StepSpec(num_tokens=self.rows, num_rows=self.rows, table_width=width, sampler=False)

    @property
    def num_pages(self) -> int:
        """P."""
        return 1 + self.rows * self.spec.table_width

    @property
    def params(self) -> Any:
        """The model's tree of shapes, bfloat16."""
        return param_shapes(self.config, jnp.bfloat16)

    @property
    def page_shape(self) -> tuple[int, ...]:
        return (2 * self.config.num_key_value_heads, BLOCK_SIZE, self.config.head_dim)

    @property
    def weight_bytes(self) -> int:
        """Read by every step: all but the embedding, of which only the rows' tokens are."""
        leaves = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return 2 * (leaves - self.config.vocab_size * self.config.hidden_size)

    @property
    def moved_bytes(self) -> int:
        """What a step must read: the weights and every row's keys and values."""
        position = 2 * self.config.num_hidden_layers * 2 * self.config.num_key_value_heads * self.config.head_dim
        return self.weight_bytes + self.rows * self.context * position

    @property
    def num_bytes(self) -> int:
        """Device memory of the arrays and of the results' float32 logits."""
        return int(1.15 * self.moved_bytes) + 16 * self.rows * self.config.vocab_size


def steps(session: Session) -> list[Step]:
    """The steps of this run, the most important first."""
    if session.options.rehearse:
        return [Step(TINY, 2, 20, variant) for variant in OPTIONS]
    plain = [Step(LLAMA_8B, rows, 1024) for rows in (1, 32, 128)]
    others = [(1, "XLA's products"), (32, "no graphs"), (32, "scanned"), (32, "XLA's products")]
    return plain + [Step(LLAMA_8B, rows, 1024, variant) for rows, variant in others]


def cases(session: Session) -> list[Case]:
    """One case a step."""
    result = []
    for step in steps(session):
        program = scanned_program(step) if step.variant == "scanned" else step_program(step)
        run = _run_scanned if step.variant == "scanned" else _run
        facts = {"rows": step.rows, "context": step.context, "variant": step.variant or "as served"}
        result.append(
            Case("decode_step", step.name, partial(run, step), (program,), num_bytes=step.num_bytes, facts=facts)
        )
    return result


def step_program(step: Step) -> Program:
    """The engine's program."""
    leaves, tree = jax.tree.flatten(step.params)
    function = make_forward_step(step.config, tree, step.spec, block_size=BLOCK_SIZE, num_logprobs=0)
    kv = kv_cache_shapes(step.config, step.num_pages, BLOCK_SIZE, "bfloat16")
    state = jax.eval_shape(lambda: init_state(step.rows, step.config.vocab_size))
    packed = jax.ShapeDtypeStruct((packed_size(step.spec),), jnp.int32)
    return Program(f"decode_step {step.name}", _jitted(step, function), (tuple(leaves), kv, state, packed))


def _jitted(step: Step, function: Any) -> Any:
    """As the engine does."""
    return jax.jit(function, donate_argnums=(1, 2), compiler_options=dict(GPU_OPTIONS) | OPTIONS[step.variant])


def scanned_program(step: Step) -> Program:
    """The same by `scanned_step`."""
    function = make_scanned_step(step.config, step.spec, step.num_pages, BLOCK_SIZE)
    pool = (step.config.num_hidden_layers * step.num_pages, *step.page_shape)
    shapes = (
        stacked_shapes(step.params, step.config.num_hidden_layers),
        jax.ShapeDtypeStruct(pool, jnp.bfloat16),
        jax.ShapeDtypeStruct((step.rows,), jnp.int32),
        jax.ShapeDtypeStruct((packed_size(step.spec),), jnp.int32),
    )
    return Program(f"decode_step {step.name}", _jitted(step, function), shapes)


def packed_inputs(step: Step) -> jax.Array:
    """Every row's next token is the one that the device drew last."""
    packed = np.zeros(packed_size(step.spec), np.int32)
    inputs = unpack(packed, step.spec)
    rows = np.arange(step.rows, dtype=np.int32)
    table = random_tables(np.random.default_rng(10), 1, step.rows, step.spec.table_width)[0]
    inputs.token_slots[:] = rows
    inputs.positions[:] = step.context - 1
    inputs.page_ids[:] = table[:, (step.context - 1) // BLOCK_SIZE]
    inputs.logits_tokens[:] = rows
    inputs.query_start[:] = np.arange(step.rows + 1)
    inputs.context_lens[:] = step.context
    inputs.block_tables[:] = table
    inputs.sampling[0] = rows
    return jnp.asarray(packed)


def _weights(shapes: Any) -> Any:
    """Norm scales of 1, everything else random with a standard deviation of 0.02. One program for each shape."""

    def make(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if path[-1].key == "scale":
            return jnp.ones(leaf.shape, leaf.dtype)
        return _weight(leaf.shape, leaf.dtype, len(jax.tree_util.keystr(path)))

    return jax.tree_util.tree_map_with_path(make, shapes)


@partial(jax.jit, static_argnums=(0, 1))
def _weight(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    return random_values(shape, dtype, seed) * jnp.asarray(0.02 * 3**0.5, dtype)


def _run(step: Step, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    (run,) = programs
    leaves = tuple(jax.tree.leaves(_weights(step.params)))
    shape = (step.num_pages, *step.page_shape)
    pools = (random_values(shape, jnp.dtype(jnp.bfloat16), layer) for layer in range(step.config.num_hidden_layers))
    kv = KVCache(tuple(map(LayerCache, pools)))
    packed = packed_inputs(step)

    def once(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        output = run(leaves, *state[:2], packed)
        return output.kv, output.state, output.packed

    state = once((kv, init_state(step.rows, step.config.vocab_size), None))
    if not np.all(np.asarray(state[2])[1]):
        raise CheckFailed("the step's logits are not finite")
    return _timed(step, session, once, state) | _kernels(session, run)


def _run_scanned(step: Step, session: Session, programs: Sequence[Compiled]) -> dict[str, Any]:
    (run,) = programs
    params = _weights(stacked_shapes(step.params, step.config.num_hidden_layers))
    shape = (step.config.num_hidden_layers * step.num_pages, *step.page_shape)
    packed = packed_inputs(step)
    state = (random_values(shape, jnp.dtype(jnp.bfloat16), 11), jnp.zeros(step.rows, jnp.int32))
    return _timed(step, session, lambda state: run(params, *state, packed), state) | _kernels(session, run)


def _kernels(session: Session, run: Any) -> dict[str, int]:
    """How many calls of our kernels the program has: none where an operation fell back to plain XLA."""
    return {"kernel_calls": run.as_text().count(TRITON_CALL)} if session.on_gpu else {}


def _timed(step: Step, session: Session, once: Callable[[Any], Any], state: Any) -> dict[str, Any]:
    timing = session.time(
        once,
        state,
        operations=1,
        sample_seconds=SAMPLE_SECONDS,
    )
    rates = session.share_of_bandwidth(step.moved_bytes, timing.seconds)
    speed = {"tokens_per_s": step.rows / timing.seconds} if session.options.claims_times else {}
    return timing.values(session.options.claims_times) | rates | speed | {"gib": round(step.moved_bytes / 2**30, 2)}
