"""Launches and kernels of a compiled program as a table for people."""

from collections.abc import Iterable, Sequence

from jaxinfer.planning.kernel_resources import KernelResources
from jaxinfer.planning.xla_dump import Launch

_HEADER = ("", "launch", "computes", "blocks", "threads", "registers", "spilled", "shared")

# What functions of JAX add to a source, and nobody wrote.
_WRAPPERS = ("jit(", "vmap(", "shard_map", "closed_call", "cond", "branch_")


def launch_table(launches: Sequence[Launch], kernels: Iterable[KernelResources]) -> str:
    """One line a launch: its name, the JAX operation behind it, and what a kernel takes of an SM.

    Registers are for each thread, spilled bytes too; shared memory is bytes a block. Library calls show none of these.
    """
    resources = {kernel.name: kernel for kernel in kernels}
    rows = [_HEADER]
    for number, launch in enumerate(launches, 1):
        kernel = resources.get(launch.name)
        cells = (str(kernel.registers), str(kernel.spill_bytes), str(kernel.shared_bytes)) if kernel else ("", "", "")
        blocks, threads = ("x".join(map(str, _without_ones(launch.grid))), str(launch.threads)) if kernel else ("", "")
        mark = "" if launch.captured else "*"
        rows.append((f"{number}{mark}", launch.name, operation(launch.source), blocks, threads, *cells))
    return aligned(rows, left=(1, 2))


def operation(source: str) -> str:
    """The last parts of a launch's source: "attn/qkv/dot_general"."""
    parts = [part for part in source.split("/") if not part.startswith(_WRAPPERS)]
    for name in ("DecoderLayer", "Decoder"):
        if name in parts:
            parts = parts[parts.index(name) + 1 :]
    return "/".join(parts[-3:])


def aligned(rows: Sequence[Sequence[str]], left: Iterable[int]) -> str:
    """Text columns as wide as their cells; those in `left` flush left, the others flush right."""
    left = frozenset(left)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _without_ones(grid: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(size for size in grid if size > 1) or (1,)
