"""What XLA makes of a decode step of Llama-3-70B's shapes over several GPUs that are not here.

For each GPU and number of them: bytes of weights, cache and scratch memory on each, and what goes between them.
Nothing is allocated; a whole model takes minutes to compile.

    python scripts/tensor_parallel_plan.py --layers 80 --gpus h200:8 --output scripts/results/tensor_parallel_70b.json
"""

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.deviceless import gpu_target
from jaxinfer.runner.deviceless_step import compile_step
from jaxinfer.runner.inputs import StepSpec

ROWS, BLOCK_SIZE, CONTEXT = 64, 16, 8192


def llama_70b(num_layers: int) -> ModelConfig:
    """Llama-3-70B with so many of its 80 layers."""
    return ModelConfig(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=num_layers,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=CONTEXT,
        rope_theta=5e5,
    )


def measured(gpu: str, count: int, num_layers: int, tokens: int) -> dict[str, Any]:
    """A greedy step of 64 rows with a pool for `tokens` tokens."""
    started = time.monotonic()
    spec = StepSpec(num_tokens=ROWS, num_rows=ROWS, table_width=CONTEXT // BLOCK_SIZE, sampler=False)
    target = gpu_target(gpu, count)
    step = compile_step(target, llama_70b(num_layers), spec, num_pages=tokens // BLOCK_SIZE, block_size=BLOCK_SIZE)
    report = step.report
    kinds = Counter(launch.kind for launch in report.launches)
    return {
        "gpu": gpu,
        "devices": count,
        "layers": num_layers,
        "rows": ROWS,
        "pool_tokens": tokens,
        "weight_bytes": step.param_bytes,
        "argument_bytes": report.argument_bytes,
        "temp_bytes": report.temp_bytes,
        "device_bytes": target.spec.memory_bytes,
        "share": round((report.argument_bytes + report.temp_bytes) / target.spec.memory_bytes, 4),
        "launches": dict(kinds),
        "copies_of_weights_or_pool": len(report.copies_of((step.shards.part_shapes(step.params), step.kv))),
        "updated_in_place": report.alias_bytes == step.donated_bytes,
        "command_buffers": report.num_command_buffers,
        "compile_seconds": round(time.monotonic() - started),
    }


def main() -> None:
    """Prints a line for each, and writes them all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--tokens", type=int, default=65536, help="of the KV cache")
    parser.add_argument("--gpus", nargs="+", default=["h200:2", "h200:4", "h200:8", "a100-80g:4", "a100-80g:8"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found = []
    for name in options.gpus:
        gpu, _, count = name.partition(":")
        found.append(measured(gpu, int(count), options.layers, options.tokens))
        print(json.dumps(found[-1]), flush=True)
        if options.output is not None:
            options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
