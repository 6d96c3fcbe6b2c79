"""The devices that an engine's replicas run on."""

import jax

from jaxinfer.sharding.placement import Placement


def placements(num_replicas: int) -> list[Placement]:
    """Where each replica lies: on JAX's default device the only one, else each on a device of its own, the first ones
    of this process.

    Args:
        num_replicas: `data_parallel_size`.

    Raises:
        ValueError: there are fewer devices.
    """
    if num_replicas == 1:
        return [Placement()]
    devices = jax.local_devices()
    if num_replicas > len(devices):
        advice = "use a smaller one"
        if devices[0].platform == "cpu":
            advice += f", or make the CPU several devices: jax.config.update('jax_num_cpu_devices', {num_replicas})"
            advice += " before anything uses JAX"
        raise ValueError(
            f"data_parallel_size={num_replicas} needs as many devices, and this process has {len(devices)} "
            f"({devices[0].platform}); {advice}"
        )
    return [Placement(device=device) for device in devices[:num_replicas]]
