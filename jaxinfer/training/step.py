"""One training step: any loss, over the devices of a mesh, in parts if need be."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

if TYPE_CHECKING:
    import optax

DATA = "data"
"""The mesh axis over which a batch's rows are split."""
Sums = dict[str, jax.Array]
Loss = Callable[[Any, Any, Any], Sums]
"""``loss(trained, frozen, batch) -> sums``: float32 scalars by name, added up over the batch's tokens; "loss" over
"weight" is what is minimised, the others are reported over "weight" as well."""


class TrainState(NamedTuple):
    """All that a step changes.

    Attributes:
        trained: tree of what is learned.
        optimizer: the optimizer's state.
        step: int32[], steps done.
    """

    trained: Any
    optimizer: Any
    step: jax.Array


StepFunction = Callable[[TrainState, Any, Any], tuple[TrainState, Sums]]


def data_mesh(devices: int | None = None) -> Mesh:
    """This process's devices, or so many of them, along `DATA`.

    Raises:
        ValueError: there are not that many.
    """
    found = jax.local_devices()
    count = len(found) if devices is None else devices
    if not 1 <= count <= len(found):
        raise ValueError(f"devices={count} must be 1 to the {len(found)} of this process")
    return Mesh(np.array(found[:count]), (DATA,))


def check_batch_size(batch_size: int, accumulate: int, devices: int) -> None:
    """Raises ValueError where a batch cannot be cut into so many parts for so many devices."""
    if batch_size < 1 or accumulate < 1:
        raise ValueError(f"batch_size={batch_size} and accumulate={accumulate} must be at least 1")
    if batch_size % (accumulate * devices):
        raise ValueError(
            f"batch_size={batch_size} must be a multiple of {accumulate * devices}: accumulate={accumulate} parts of "
            f"rows for each of {devices} device{'s' if devices > 1 else ''}"
        )


def init_state(trained: Any, optimizer: "optax.GradientTransformation", mesh: Mesh) -> TrainState:
    """The state before the first step, on every device of the mesh.

    Args:
        trained: tree of float arrays; copied, since a step donates its state.
        optimizer: as for `make_step`.
        mesh: of `data_mesh`.
    """
    everywhere = NamedSharding(mesh, PartitionSpec())
    fresh = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=everywhere)(trained)
    return TrainState(
        fresh,
        jax.jit(optimizer.init, out_shardings=everywhere)(fresh),
        jax.device_put(np.int32(0), everywhere),
    )


def make_step(
    loss: Loss, optimizer: "optax.GradientTransformation", mesh: Mesh, *, accumulate: int = 1
) -> StepFunction:
    """Compiles ``step(state, frozen, batch) -> (state, metrics)``.

    Each device takes its share of the batch's rows, in `accumulate` parts one after the other, and adds up gradients
    of the sums; what is divided by the weight of the whole batch is what one device without parts would get, up to the
    order of additions. The state is donated.

    Args:
        loss: see `Loss`.
        optimizer: of `make_optimizer`.
        mesh: of `data_mesh`.
        accumulate: parts of each device's share.

    Returns:
        The step. `frozen` is a tree that is the same on all devices, `batch` a tree of arrays ``[rows, ...]``, numpy's
        too, whose rows are a multiple of devices times `accumulate` (`check_batch_size`). The metrics are the sums of
        `Loss` over "weight", "weight" itself, and "grad_norm" before clipping.
    """
    import optax

    rows, same = PartitionSpec(DATA), PartitionSpec()

    @partial(jax.shard_map, mesh=mesh, in_specs=(same, same, rows), out_specs=(same, same), check_vma=False)
    def gradients(trained: Any, frozen: Any, batch: Any) -> tuple[Any, Sums]:
        return jax.lax.psum(_accumulated(loss, trained, frozen, batch, accumulate), DATA)

    @partial(jax.jit, donate_argnums=(0,))
    def step(state: TrainState, frozen: Any, batch: Any) -> tuple[TrainState, Sums]:
        summed, sums = gradients(state.trained, frozen, batch)
        weight = jnp.maximum(sums["weight"], 1.0)
        mean = jax.tree.map(lambda leaf: leaf / weight, summed)
        updates, optimizer_state = optimizer.update(mean, state.optimizer, state.trained)
        norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(mean)))
        metrics = {**means(sums), "grad_norm": norm}
        return TrainState(optax.apply_updates(state.trained, updates), optimizer_state, state.step + 1), metrics

    return lambda state, frozen, batch: step(state, frozen, on_mesh(batch, mesh))


def make_evaluation(loss: Loss, mesh: Mesh) -> Callable[[Any, Any, Any], Sums]:
    """Compiles ``evaluate(trained, frozen, batch) -> sums`` of `Loss` over all devices; nothing is donated."""
    rows, same = PartitionSpec(DATA), PartitionSpec()

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(same, same, rows), out_specs=same, check_vma=False)
    def evaluate(trained: Any, frozen: Any, batch: Any) -> Sums:
        return jax.lax.psum(loss(trained, frozen, batch), DATA)

    return lambda trained, frozen, batch: evaluate(trained, frozen, on_mesh(batch, mesh))


def means(sums: Mapping[str, jax.Array]) -> Sums:
    """Each of them over "weight", which stays as it is."""
    weight = jnp.maximum(sums["weight"], 1.0)
    return {name: value if name == "weight" else value / weight for name, value in sums.items()}


def on_mesh(batch: Any, mesh: Mesh) -> Any:
    """A batch's rows, split over the mesh."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec(DATA)))


def _accumulated(loss: Loss, trained: Any, frozen: Any, batch: Any, parts: int) -> tuple[Any, Sums]:
    """Gradients of the sum "loss", and all sums, over parts of the rows one after the other."""

    def of(part: Any) -> tuple[Any, Sums]:
        def summed(tree: Any) -> tuple[jax.Array, Sums]:
            sums = loss(tree, frozen, part)
            return sums["loss"], sums

        (_, sums), slopes = jax.value_and_grad(summed, has_aux=True)(trained)
        return slopes, sums

    if parts == 1:
        return of(batch)
    cut = jax.tree.map(lambda array: array.reshape(parts, -1, *array.shape[1:]), batch)
    zero = jax.tree.map(jnp.zeros_like, jax.eval_shape(of, jax.tree.map(lambda array: array[0], cut)))
    total, _ = jax.lax.scan(lambda sofar, part: (jax.tree.map(jnp.add, sofar, of(part)), None), zero, cut)
    return total
