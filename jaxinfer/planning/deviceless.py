"""Compiling for a GPU that is not here: exact memory, the launch list and the CUDA graphs of a program.

Needs JAX's CUDA plugin (`pip install jax-cuda12-plugin jax-cuda12-pjrt`, in the version of JAX) and CUDA's assembler
(`nvidia-cuda-nvcc-cu12`, or a `ptxas` on the PATH), but no GPU, no driver and no CUDA libraries when the process runs
with JAX_PLATFORMS=cpu. What it cannot tell is time: XLA tunes its matrix products by running them, so without a GPU it
takes its default tiles.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxinfer.planning.gpu_specs import GPU_SPECS, GPUSpec
from jaxinfer.planning.kernel_resources import KernelResources, kernels_of, read_cubins
from jaxinfer.planning.xla_dump import Buffer, Launch, parse_launches, parse_sources, parse_temporaries


@dataclass(frozen=True)
class GPUTarget:
    """Devices that exist only for the compiler; `mesh` has the one axis "model"."""

    spec: GPUSpec
    mesh: Mesh


@dataclass(frozen=True)
class DevicelessReport:
    """What the compiler decided. Bytes are for each device.

    Attributes:
        argument_bytes, output_bytes: of all arguments and results.
        alias_bytes: results that reuse the memory of donated arguments.
        temp_bytes: scratch memory of the program, with reuse inside it.
        temporaries: what lies in that scratch memory at some time, largest first.
        launches: kernels, copies and library calls, in program order.
        num_command_buffers: CUDA graphs that the launches are captured in.
        kernels: what each of the program's kernels takes of an SM, in order of first launch.
        compile_seconds: lowering and compiling.
        hlo: the optimised program.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    temporaries: tuple[Buffer, ...]
    launches: tuple[Launch, ...]
    num_command_buffers: int
    kernels: tuple[KernelResources, ...]
    compile_seconds: float
    hlo: str

    def launches_outside_graphs(self) -> tuple[Launch, ...]:
        """Launches that the host issues one by one."""
        return tuple(launch for launch in self.launches if not launch.captured)

    def copies_of(self, arrays: Any) -> tuple[Buffer, ...]:
        """Temporaries as large as one of `arrays` (a tree of arrays or shapes): copies of it, in whatever form.

        Arrays of less than 1 MiB are passed over; that size turns up by chance.
        """
        sizes = {leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(arrays)}
        return tuple(b for b in self.temporaries if b.num_bytes >= 1 << 20 and b.num_bytes in sizes)


def gpu_target(name: str, num_devices: int = 1) -> GPUTarget:
    """Devices of a GPU model that need not exist.

    Args:
        name: one of `GPU_SPECS`, such as "a100-80g" or "h200".
        num_devices: GPUs in one machine.

    Raises:
        ValueError: an unknown name, or no devices.
        RuntimeError: the CUDA plugin is missing; says what to install.
    """
    if name not in GPU_SPECS:
        raise ValueError(f"name={name!r} is not a known GPU; use one of {', '.join(GPU_SPECS)}")
    if num_devices < 1:
        raise ValueError(f"num_devices={num_devices} must be at least 1")
    spec = GPU_SPECS[name]
    try:
        topology = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=_target_config(spec), topology=f"1x1x{num_devices}"
        )
    except Exception as error:  # the exception's type differs between JAX versions
        raise RuntimeError(
            f"JAX cannot describe a GPU ({error}): its CUDA plugin is missing or did not start. Run `pip install "
            f"jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__} nvidia-cuda-nvcc-cu12`; on a "
            "machine without a GPU set JAX_PLATFORMS=cpu for the process"
        ) from error
    return GPUTarget(spec, Mesh(np.array(topology.devices), ("model",), axis_types=(AxisType.Auto,)))


def compile_for(
    target: GPUTarget, function: Any, *args: Any, compiler_options: Mapping[str, Any] | None = None
) -> DevicelessReport:
    """Compiles `function(*args)` for the target and reports what came out.

    Args:
        target: from `gpu_target`.
        function: a `jax.jit` function, with its donations and static arguments.
        args: arrays or `jax.ShapeDtypeStruct`s in any trees, and static arguments. A leaf without a sharding of its own
            lies whole on every device.
        compiler_options: XLA's options by name, as `jax.jit` takes them.
    """
    args = jax.tree.map(lambda leaf: _on(target.mesh, leaf), args)
    with tempfile.TemporaryDirectory() as folder, _no_persistent_cache():
        begin = time.perf_counter()
        with compiling_for(target):
            lowered = function.lower(*args)
        # XLA puts the machine code of every kernel into its cache file.
        cubins = Path(folder) / "kernels"
        dumps = {"xla_dump_to": folder, "xla_gpu_kernel_cache_file": str(cubins)}
        compiled = lowered.compile(compiler_options={**(compiler_options or {}), **dumps})
        seconds = time.perf_counter() - begin
        # The first is written only when capturing into graphs changed the list.
        thunks = _dumped(folder, "thunk_sequence_after_thunk_passes.txt", "thunk_sequence.txt")
        hlo = compiled.as_text()
        sources = parse_sources("\n".join(_dumped(folder, "thunk_metadata.txt")), hlo)
        launches, num_command_buffers = parse_launches(thunks, sources)
        temporaries = parse_temporaries(_dumped(folder, "buffer-assignment.txt"))
        kernels = kernels_of(launches, read_cubins(cubins.read_bytes()) if cubins.exists() else {})
    memory = compiled.memory_analysis()
    return DevicelessReport(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        temporaries=temporaries,
        launches=launches,
        num_command_buffers=num_command_buffers,
        kernels=kernels,
        compile_seconds=seconds,
        hlo=hlo,
    )


def _on(mesh: Mesh, leaf: Any) -> Any:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        return leaf
    sharding = leaf.sharding if isinstance(leaf, jax.ShapeDtypeStruct) else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or NamedSharding(mesh, PartitionSpec()))


@contextlib.contextmanager
def compiling_for(target: GPUTarget) -> Iterator[None]:
    """Inside, whatever asks for the device is told of this one (`pallas_kernels.dispatch.current_device`)."""
    with jax.sharding.use_abstract_mesh(_abstract_mesh(target)):
        yield


def _abstract_mesh(target: GPUTarget) -> AbstractMesh:
    """Tells Pallas which GPU its kernels are lowered for."""
    device = AbstractDevice(device_kind=target.spec.device_name, num_cores=target.spec.num_sms, platform="gpu")
    mesh = target.mesh
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=mesh.axis_types, abstract_device=device)


@contextlib.contextmanager
def _no_persistent_cache() -> Iterator[None]:
    """A program for a device that is not here can be stored in JAX's cache, but not read back."""
    enabled = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", enabled)
        compilation_cache.reset_cache()


def _dumped(folder: str, *endings: str) -> Sequence[str]:
    """Lines of the first dump file with one of these endings; only one program was compiled into the folder."""
    for ending in endings:
        for path in Path(folder).glob(f"*{ending}"):
            return path.read_text().splitlines()
    raise RuntimeError(f"XLA of jax {jax.__version__} wrote no *{endings[-1]}; this JAX is too new for the report")


def _target_config(spec: GPUSpec) -> str:
    """XLA's GpuTargetConfigProto in text form. Not listed in `GPUSpec` are the limits common to all these GPUs."""
    major, minor = spec.compute_capability
    feature, suffix = ("feature_extension: ACCELERATED_FEATURES", "a") if spec.has_accelerated_features else ("", "")
    return f"""
        gpu_device_info {{
            cuda_compute_capability {{ major: {major} minor: {minor} {feature} }}
            platform_version: "Compute Capability {major}.{minor}{suffix}"
            name: "{spec.device_name}"
            device_vendor: "NVIDIA Corporation"
            core_count: {spec.num_sms}
            clock_rate_ghz: {spec.clock_ghz}
            fpus_per_core: {spec.fpus_per_sm}
            threads_per_core_limit: {spec.threads_per_sm}
            threads_per_block_limit: 1024
            threads_per_warp: 32
            thread_dim_limit_x: 1024
            thread_dim_limit_y: 1024
            thread_dim_limit_z: 64
            block_dim_limit_x: 2147483647
            block_dim_limit_y: 65535
            block_dim_limit_z: 65535
            registers_per_core_limit: 65536
            registers_per_block_limit: 65536
            shared_memory_per_block: 49152
            shared_memory_per_core: {spec.shared_memory_per_sm}
            shared_memory_per_block_optin: {spec.shared_memory_per_block}
            device_memory_size: {spec.memory_bytes}
            memory_bandwidth: {int(spec.memory_bandwidth)}
            l2_cache_size: {spec.l2_bytes}
            device_address_bits: 64
            pcie_bandwidth: 34359738368
            driver_version: "12.9.0"
            runtime_version: "12.9.0"
            compile_time_toolkit_version: "12.9.0"
            dnn_version: "9.10.0"
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{spec.device_name}"
    """
