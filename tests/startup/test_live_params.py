"""Live parameters on more devices than the engine has."""

import subprocess
import sys

PROGRAM = """
import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import init_params
from jaxinfer.startup.live_params import match_params

jax.config.update("jax_num_cpu_devices", 2)
config = ModelConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
params = init_params(config, jax.random.key(0))
match_params(params, config, "float32")
everywhere = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec())
try:
    match_params(jax.device_put(params, everywhere), config, "float32")
except ValueError as error:
    print(error)
"""


def test_sharded_parameters_are_refused() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (
        "lies on 2 devices; the engine runs on one: give their mesh=, or jax.device_put(params, jax.devices()[0])"
        in done.stdout
    ), done
