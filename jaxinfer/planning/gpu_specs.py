"""The GPUs that programs are compiled for and plans are made for."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

FP8_CAPABILITY = (8, 9)
"""Compute capability from which tensor cores multiply float8."""


@dataclass(frozen=True)
class GPUSpec:
    """One GPU model: CUDA device properties, and the vendor's data sheet for rates.

    Attributes:
        device_name: as the driver reports it.
        compute_capability: (major, minor).
        num_sms: streaming multiprocessors.
        memory_bytes: device memory as CUDA shows it, which is a little less than nvidia-smi and the data sheet say.
        memory_bandwidth: bytes per second.
        l2_bytes: L2 cache.
        shared_memory_per_sm, shared_memory_per_block: bytes; the latter is what a kernel can opt in to.
        clock_ghz: boost clock of the SMs.
        fpus_per_sm: float32 lanes.
        threads_per_sm: resident threads.
        bf16_flops, int8_ops: dense tensor-core operations per second.
    """

    device_name: str
    compute_capability: tuple[int, int]
    num_sms: int
    memory_bytes: int
    memory_bandwidth: float
    l2_bytes: int
    shared_memory_per_sm: int
    shared_memory_per_block: int
    clock_ghz: float
    fpus_per_sm: int
    threads_per_sm: int
    bf16_flops: float
    int8_ops: float

    @property
    def has_accelerated_features(self) -> bool:
        """Whether the architecture has instructions of its own ("sm_90a"), as all from Hopper on do."""
        return self.compute_capability >= (9, 0)


def _a100(device_name: str, memory_bytes: int, memory_bandwidth: float) -> GPUSpec:
    return GPUSpec(
        device_name=device_name,
        compute_capability=(8, 0),
        num_sms=108,
        memory_bytes=memory_bytes,
        memory_bandwidth=memory_bandwidth,
        l2_bytes=40 << 20,
        shared_memory_per_sm=164 << 10,
        shared_memory_per_block=163 << 10,
        clock_ghz=1.41,
        fpus_per_sm=64,
        threads_per_sm=2048,
        bf16_flops=312e12,
        int8_ops=624e12,
    )


def _hopper(device_name: str, memory_bytes: int, memory_bandwidth: float) -> GPUSpec:
    return GPUSpec(
        device_name=device_name,
        compute_capability=(9, 0),
        num_sms=132,
        memory_bytes=memory_bytes,
        memory_bandwidth=memory_bandwidth,
        l2_bytes=50 << 20,
        shared_memory_per_sm=228 << 10,
        shared_memory_per_block=227 << 10,
        clock_ghz=1.98,
        fpus_per_sm=128,
        threads_per_sm=2048,
        bf16_flops=989e12,
        int8_ops=1979e12,
    )


def _ada(
    device_name: str,
    num_sms: int,
    memory_bytes: int,
    memory_bandwidth: float,
    l2_mib: int,
    clock_ghz: float,
    bf16_flops: float,
    int8_ops: float,
) -> GPUSpec:
    return GPUSpec(
        device_name=device_name,
        compute_capability=(8, 9),
        num_sms=num_sms,
        memory_bytes=memory_bytes,
        memory_bandwidth=memory_bandwidth,
        l2_bytes=l2_mib << 20,
        shared_memory_per_sm=100 << 10,
        shared_memory_per_block=99 << 10,
        clock_ghz=clock_ghz,
        fpus_per_sm=128,
        threads_per_sm=1536,
        bf16_flops=bf16_flops,
        int8_ops=int8_ops,
    )


_B200 = GPUSpec(
    device_name="NVIDIA B200",
    compute_capability=(10, 0),
    num_sms=148,
    memory_bytes=182_642 << 20,
    memory_bandwidth=7700e9,
    l2_bytes=126 << 20,
    shared_memory_per_sm=228 << 10,
    shared_memory_per_block=227 << 10,
    clock_ghz=1.965,
    fpus_per_sm=128,
    threads_per_sm=2048,
    bf16_flops=2250e12,
    int8_ops=4500e12,
)

GPU_SPECS: Mapping[str, GPUSpec] = MappingProxyType(
    {
        "a100-40g": _a100("NVIDIA A100-SXM4-40GB", 42_505_273_344, 1555e9),
        "a100-80g": _a100("NVIDIA A100-SXM4-80GB", 81_050 << 20, 2039e9),
        "rtx4090": _ada("NVIDIA GeForce RTX 4090", 128, 24_207 << 20, 1008e9, 72, 2.52, 165e12, 661e12),
        "l4": _ada("NVIDIA L4", 58, 22_559 << 20, 300e9, 48, 2.04, 121e12, 242e12),
        "l40s": _ada("NVIDIA L40S", 142, 45_455 << 20, 864e9, 96, 2.52, 362e12, 733e12),
        "h100": _hopper("NVIDIA H100 80GB HBM3", 84_942_979_072, 3352e9),
        "h200": _hopper("NVIDIA H200", 143_155 << 20, 4800e9),
        "b200": _B200,
    }
)
"""By the short names that commands take."""
