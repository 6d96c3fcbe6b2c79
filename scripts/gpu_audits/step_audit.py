"""What a person wants to know about a decode step on a GPU: memory, launches, graphs, kernels, and its least time."""

from __future__ import annotations

from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.deviceless import gpu_target
from jaxinfer.planning.gpu_specs import GPUSpec
from jaxinfer.planning.launch_table import launch_table
from jaxinfer.planning.roofline import ASSUMED_SECONDS_A_LAUNCH, Roofline, decode_roofline
from jaxinfer.planning.xla_dump import Launch
from jaxinfer.runner.deviceless_step import DevicelessStep, compile_step
from jaxinfer.runner.inputs import StepSpec

MIB, GIB = 1 << 20, 1 << 30
BLOCK_SIZE = 16


def audit_step(gpu: str, name: str, config: ModelConfig, batch: int, context: int, num_devices: int) -> str:
    """Compiles the decode step of `batch` rows in bfloat16 and describes it.

    Args:
        gpu: the GPU model.
        name: of the model, for the heading.
        config: the architecture.
        batch: B.
        context: positions of each row, for the roofline and the size of the pool.
        num_devices: that the layers are split over.
    """
    target = gpu_target(gpu, num_devices)
    pages = -(-context // BLOCK_SIZE)
    spec = StepSpec(num_tokens=batch, num_rows=batch, table_width=pages, sampler=False)
    step = compile_step(target, config, spec, num_pages=batch * pages + 1, block_size=BLOCK_SIZE)
    roofline = decode_roofline(config, batch, context, step.param_bytes, num_devices)
    devices = f"{num_devices} x {target.spec.device_name}" if num_devices > 1 else target.spec.device_name
    heading = f"{name}, decode of {batch} rows of {context} positions, bfloat16, on {devices}"
    kernels = step.report.kernels
    _, *layers = step.layers() or ((),)
    parts = [f"{heading}\n{'=' * len(heading)}", _memory(step, target.spec.memory_bytes), _launches(step)]
    if layers:
        parts.append(
            "A layer (registers and spilled bytes: a thread; shared memory: bytes a block; *: outside a graph):\n"
            + launch_table(layers[-1], kernels)
        )
    once = _outside_layers(step)
    parts.append("Once a step:\n" + launch_table(once, kernels))
    parts.append(_roofline(roofline, step, target.spec))
    return "\n\n".join(parts)


def _memory(step: DevicelessStep, memory_bytes: int) -> str:
    report = step.report
    pool = step.donated_bytes / GIB
    total = report.argument_bytes + report.temp_bytes + report.output_bytes - report.alias_bytes
    copies = report.copies_of((step.params, step.kv))
    in_place = "all of it" if report.alias_bytes == step.donated_bytes else f"{report.alias_bytes / GIB:.2f} GiB"
    return "\n".join(
        [
            "Memory of each device:",
            f"  weights   {step.param_bytes / GIB:8.2f} GiB",
            f"  KV pool   {pool:8.2f} GiB, updated in place: {in_place}",
            f"  scratch   {report.temp_bytes / MIB:8.2f} MiB, copies of weights or pages in it: {len(copies)}",
            f"  together  {total / GIB:8.2f} GiB of {memory_bytes / GIB:.1f} GiB",
        ]
    )


def _launches(step: DevicelessStep) -> str:
    report = step.report
    outside = report.launches_outside_graphs()
    kinds = ", ".join(sorted({launch.kind for launch in outside}))
    sizes = [len(layer) for layer in step.layers()[1:]]
    layers = f"{min(sizes)} to {max(sizes)}" if len(set(sizes)) > 1 else str(sizes[0]) if sizes else "?"
    spilling = [kernel.name for kernel in report.kernels if kernel.spill_bytes]
    return "\n".join(
        [
            f"Launches: {len(report.launches)} a step, {layers} a layer",
            f"CUDA graphs: {report.num_command_buffers}; launches outside: {len(outside)}"
            + (f" ({kinds})" * bool(kinds)),
            f"Kernels: {len(report.kernels)}; with spilled registers: {', '.join(spilling) or 'none'}",
            f"Compiled in {report.compile_seconds:.1f} s",
        ]
    )


def _outside_layers(step: DevicelessStep) -> list[Launch]:
    return [launch for launch in step.report.launches if "DecoderLayer" not in launch.source]


def _roofline(roofline: Roofline, step: DevicelessStep, gpu: GPUSpec) -> str:
    memory, compute = roofline.memory_seconds(gpu), roofline.compute_seconds(gpu)
    launches = len(step.report.launches)
    return "\n".join(
        [
            "Roofline of each device:",
            f"  weights read    {roofline.weight_bytes / 1e9:8.3f} GB",
            f"  KV cache        {roofline.kv_bytes / 1e9:8.3f} GB",
            f"  logits          {roofline.logits_bytes / 1e9:8.3f} GB",
            f"  at {gpu.memory_bandwidth / 1e9:.0f} GB/s    {memory * 1e3:8.3f} ms",
            f"  products        {roofline.flops / 1e12:8.3f} TFLOP, at {gpu.bf16_flops / 1e12:.0f} TFLOP/s "
            f"{compute * 1e3:.3f} ms",
            f"  launches        {launches * ASSUMED_SECONDS_A_LAUNCH * 1e3:8.3f} ms, if one costs "
            f"{ASSUMED_SECONDS_A_LAUNCH * 1e6:g} us (an assumption)",
        ]
    )
