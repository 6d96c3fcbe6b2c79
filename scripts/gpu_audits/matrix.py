"""Compiles the matrix of kernels, cases and GPUs in several processes, and makes a table of what came out."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from jaxinfer.planning.deviceless import gpu_target
from jaxinfer.planning.kernel_resources import KernelResources
from jaxinfer.planning.launch_table import aligned
from jaxinfer.progress_bar import ProgressBar
from scripts.gpu_audits.kernel_cases import kernel_cases

HEADER = ("GPU", "case", "kernel", "threads", "registers", "spilled", "shared", "temp")


@dataclass(frozen=True)
class Outcome:
    """Of one case on one GPU.

    Attributes:
        gpu, op, name: which.
        kernels: of the operation's own; none where it runs in plain XLA.
        temp_bytes: scratch memory of the program.
        shared_limit: shared memory that a block can have on the GPU.
        error: why it did not compile, or "".
    """

    gpu: str
    op: str
    name: str
    kernels: tuple[KernelResources, ...]
    temp_bytes: int
    shared_limit: int
    error: str = ""

    @property
    def faults(self) -> list[str]:
        """What is wrong with it."""
        where = f"{self.gpu}, {self.op}, {self.name}"
        if self.error:
            return [f"{where}: {self.error}"]
        spilled = [f"{where}: {k.name} spills {k.spill_bytes} bytes" for k in self.kernels if k.spill_bytes]
        shared = [
            f"{where}: {k.name} takes {k.shared_bytes} bytes of shared memory, the GPU has {self.shared_limit}"
            for k in self.kernels
            if k.shared_bytes > self.shared_limit
        ]
        return spilled + shared


def audit_kernels(gpus: Sequence[str], ops: Sequence[str], jobs: int) -> list[Outcome]:
    """Every case of the operations `ops` on every GPU, in that order."""
    keys = [(gpu, op, name) for op, name in kernel_cases() if op in ops for gpu in gpus]
    outcomes: dict[tuple[str, str, str], Outcome] = {}
    # Spawned, not forked: JAX has threads.
    context = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(jobs, mp_context=context) as pool,
        ProgressBar(total=len(keys), desc="Compiling kernels") as bar,
    ):
        futures = {pool.submit(compile_case, *key): key for key in keys}
        for future in as_completed(futures):
            key = futures[future]
            try:
                outcomes[key] = future.result()
            except Exception as error:  # a worker that died: the compiler aborts on some programs
                outcomes[key] = Outcome(*key, (), 0, 0, f"{type(error).__name__}: {error}")
            bar.update()
    return [outcomes[key] for key in keys]


def compile_case(gpu: str, op: str, name: str) -> Outcome:
    """One case; what JAX and XLA raise becomes part of the outcome."""
    limit = gpu_target(gpu).spec.shared_memory_per_block
    try:
        report = kernel_cases()[op, name].compile(gpu)
    except Exception as error:
        return Outcome(gpu, op, name, (), 0, limit, f"{type(error).__name__}: {str(error).splitlines()[0]}")
    kernels = tuple(kernel for kernel in report.kernels if kernel.name.startswith(op))
    return Outcome(gpu, op, name, kernels, report.temp_bytes, limit)


def kernel_table(outcomes: Sequence[Outcome]) -> str:
    """One line for each kernel of each case."""
    rows: list[Sequence[str]] = [HEADER]
    for outcome in outcomes:
        temp = f"{outcome.temp_bytes / 2**20:.1f} MiB"
        label = (outcome.gpu, outcome.name)
        if outcome.error:
            rows.append((*label, f"{outcome.op}: {outcome.error}", "", "", "", "", ""))
        elif not outcome.kernels:
            rows.append((*label, f"{outcome.op} in plain XLA", "", "", "", "", temp))
        for k in outcome.kernels:
            numbers = (k.threads, k.registers, k.spill_bytes, k.shared_bytes)
            rows.append((*label, k.name, *map(str, numbers), temp))
    return aligned(rows, left=(0, 1, 2))
