"""Parameters may lie on any device; the engine uses them on its own."""

import os
import subprocess
import sys

ELSEWHERE = """
import jax, jax.numpy as jnp
from jaxinfer import LLM, ModelConfig, SamplingParams
from jaxinfer.models.decoder import init_params

config = ModelConfig(64, 16, 32, 1, 2)
params = init_params(config, jax.random.key(0))
options = dict(enforce_eager=True, use_tqdm_on_load=False, max_num_seqs=1, max_num_batched_tokens=8, max_model_len=32)
options |= dict(num_gpu_blocks_override=4, compilation_cache_dir=False)

def output(llm):
    return llm.generate([1, 2, 3], SamplingParams(temperature=0), use_tqdm=False)[0].outputs[0].token_ids

for device in jax.devices():
    placed = jax.device_put(params, device)
    llm = LLM(model_config=config, params=placed, **options)
    started = output(llm)
    llm.update_params(jax.tree.map(jnp.zeros_like, params))
    llm.update_params(placed)
    print(device.id, started, started == output(llm))
"""


def test_parameters_on_another_device() -> None:
    """They are copied to the engine's; two CPU devices in a process of their own."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run = subprocess.run([sys.executable, "-c", ELSEWHERE], env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    devices, tokens = zip(*(line.split(" ", 1) for line in run.stdout.splitlines()), strict=True)
    assert devices == ("0", "1")
    assert len(set(tokens)) == 1 and tokens[0].endswith("True")
