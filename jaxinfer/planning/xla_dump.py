"""Reading what XLA writes about a compiled GPU program: its launch list and its buffers."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

_THUNK = re.compile(r"(?P<indent> *)(?P<index>\d+): (?P<kind>k\w+) *\[[^\]]*\] *(?P<name>\S*)(?P<rest>.*)")
_DIMENSIONS = re.compile(r"grid: \[(\d+), (\d+), (\d+)\] threads: \[(\d+), (\d+), (\d+)\]")
_SHARED_MEMORY = re.compile(r"shared_memory: (\d+) bytes")
_ANNOTATION = re.compile(r'profile_annotation: "(?P<name>[^"]+)"\s+thunk_id: (?P<index>\d+)')
_OPERATION = re.compile(r'^ *(?:ROOT )?%?(?P<name>\S+) = .*metadata=\{[^}]*op_name="(?P<operation>[^"]+)"', re.M)
_ALLOCATION = re.compile(r"allocation \d+: size \d+, ?(?P<kinds>.*):$")
_VALUE = re.compile(r" value: <\d+ (?P<name>\S+) @\d+> \(size=(?P<size>\d+),")

# Thunks that hold others, and events that launch nothing on the device.
_COMMAND_BUFFER = "kCommandBuffer"
_GROUPS = frozenset({_COMMAND_BUFFER, "kDynamicSliceFusion", "kSequential", "kWhile", "kConditional", "kAsyncStart"})
_EVENTS = frozenset({"kAsyncDone", "kWaitForStreams", "kEmptyThunk"})


@dataclass(frozen=True)
class Launch:
    """One thing the device is told to do.

    Attributes:
        kind: XLA's word without its k: "CustomKernel", "Kernel", "Copy", "Gemm", "CustomCall", ...
        name: of the instruction it runs.
        captured: it is part of a CUDA graph.
        grid: blocks, (x, y, z); ones for what is no kernel of the program's own.
        threads: threads a block.
        shared_bytes: shared memory a block that the launch asks for, on top of what the kernel itself declares.
        source: the JAX operation it computes, with the functions and modules around it ("jit(step)/.../mlp/dot").
    """

    kind: str
    name: str
    captured: bool
    grid: tuple[int, int, int] = (1, 1, 1)
    threads: int = 1
    shared_bytes: int = 0
    source: str = ""


@dataclass(frozen=True)
class Buffer:
    """A value in memory: the instruction that makes it, and its bytes."""

    name: str
    num_bytes: int


def parse_launches(
    lines: Iterable[str], sources: Mapping[int, str] = MappingProxyType({})
) -> tuple[tuple[Launch, ...], int]:
    """Launches in program order, and the number of command buffers (CUDA graphs), of a `thunk_sequence*.txt`.

    Args:
        lines: of that file.
        sources: from `parse_sources`.
    """
    launches: list[Launch] = []
    graph_indent: int | None = None
    num_command_buffers = 0
    for line in lines:
        match = _THUNK.match(line)
        if match is None:
            continue
        indent, kind = len(match["indent"]), match["kind"]
        if graph_indent is not None and indent <= graph_indent:
            graph_indent = None
        if kind == _COMMAND_BUFFER:
            graph_indent = indent
            num_command_buffers += 1
        if kind not in _GROUPS | _EVENTS:
            launch = _launch(kind.removeprefix("k"), match["name"], graph_indent is not None, match["rest"])
            launches.append(replace(launch, source=sources.get(int(match["index"]), "")))
    return tuple(launches), num_command_buffers


def parse_sources(metadata: str, hlo: str) -> dict[int, str]:
    """The JAX operation behind each launch, by the launch's number.

    Args:
        metadata: XLA's `*thunk_metadata.txt`, which names an instruction for each launch.
        hlo: the optimised program, which names an operation for each instruction.
    """
    operations = {match["name"]: match["operation"] for match in _OPERATION.finditer(hlo)}
    return {
        int(match["index"]): operations[match["name"]]
        for match in _ANNOTATION.finditer(metadata)
        if match["name"] in operations
    }


def _launch(kind: str, name: str, captured: bool, rest: str) -> Launch:
    dimensions, shared = _DIMENSIONS.search(rest), _SHARED_MEMORY.search(rest)
    if dimensions is None:
        return Launch(kind, name, captured)
    x, y, z, *threads = map(int, dimensions.groups())
    return Launch(kind, name, captured, (x, y, z), math.prod(threads), int(shared[1]) if shared else 0)


def parse_temporaries(lines: Iterable[str]) -> tuple[Buffer, ...]:
    """Values of the scratch allocations, largest first, of a `*buffer-assignment.txt`."""
    temporaries: list[Buffer] = []
    is_scratch = False
    for line in lines:
        allocation = _ALLOCATION.match(line)
        if allocation is not None:
            is_scratch = "preallocated-temp" in allocation["kinds"]
        value = _VALUE.match(line)
        if is_scratch and value is not None:
            temporaries.append(Buffer(value["name"], int(value["size"])))
    return tuple(sorted(temporaries, key=lambda buffer: -buffer.num_bytes))
