"""The option that gives JAX's GPU client its share of the memory is one that the installed plugin takes."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import jax
from jax._src import xla_bridge
from jaxlib import xla_client
from jaxinfer.startup import device_memory

device_memory._expects_gpu = lambda platforms: True
xla_bridge.discover_pjrt_plugins()
assert device_memory.claim_gpu_memory(float(sys.argv[1]))
if len(sys.argv) > 2:
    jax.config.update("jax_pjrt_client_create_options", {"memory_fraction": sys.argv[2]})
try:
    xla_bridge.make_pjrt_c_api_client("cuda", xla_client.generate_pjrt_gpu_plugin_options())
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize(("arguments", "refused"), [(["0.9"], False), (["0.9", "much"], True)])
def test_the_plugin_takes_the_option(arguments: list[str], refused: bool) -> None:
    """Options are looked at before devices are looked for; with a GPU the client is made."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert ("memory_fraction has type" in done.stdout) is refused
    assert ("INVALID_ARGUMENT" in done.stdout) is refused
