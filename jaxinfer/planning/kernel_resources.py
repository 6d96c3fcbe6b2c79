"""Registers, spills and shared memory of compiled GPU kernels, read from their machine code; needs no CUDA tool."""

import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jaxinfer.planning.xla_dump import Launch

_ELF_MAGIC = b"\x7fELF\x02\x01"
_MACHINE_CUDA = 190
_SYMBOL_TABLE, _NO_BITS = 2, 8

# Attributes of the section .nv.info: each is (format, id, size) followed by (symbol, value).
_INFO_WITH_SIZE = 4
_INFO_FRAME_SIZE, _INFO_REGISTERS = 0x11, 0x2F

# From Hopper on, the linker sets this much of a block's shared memory aside and counts it as the kernel's own.
_RESERVED_SHARED_BYTES = 1024


@dataclass(frozen=True)
class CubinKernel:
    """What one kernel's machine code asks for.

    Attributes:
        name: of the kernel.
        registers: 32-bit registers a thread.
        stack_bytes: local memory a thread. Compiled tiles have no arrays that need it, so these are spilled registers.
        shared_bytes: shared memory a block that the code itself declares; a launch may add to it.
    """

    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int


@dataclass(frozen=True)
class KernelResources:
    """What one kernel of a program takes of an SM.

    Attributes:
        name: of the kernel; launches with equal code share one.
        launches: how often the program launches it.
        grid: blocks, (x, y, z).
        threads: threads a block.
        registers: 32-bit registers a thread.
        spill_bytes: bytes a thread of registers that did not fit and live in memory.
        shared_bytes: shared memory a block.
    """

    name: str
    launches: int
    grid: tuple[int, int, int]
    threads: int
    registers: int
    spill_bytes: int
    shared_bytes: int


def kernels_of(launches: Iterable[Launch], cubins: Mapping[str, CubinKernel]) -> tuple[KernelResources, ...]:
    """The kernels that `launches` launch, in order of their first launch; library calls and copies are passed over."""
    counts: dict[str, int] = {}
    first: dict[str, Launch] = {}
    for launch in launches:
        if launch.name in cubins:
            counts[launch.name] = counts.get(launch.name, 0) + 1
            first.setdefault(launch.name, launch)
    return tuple(
        KernelResources(
            name=name,
            launches=counts[name],
            grid=launch.grid,
            threads=launch.threads,
            registers=cubins[name].registers,
            spill_bytes=cubins[name].stack_bytes,
            shared_bytes=cubins[name].shared_bytes + launch.shared_bytes,
        )
        for name, launch in first.items()
    )


def read_cubins(data: bytes) -> dict[str, CubinKernel]:
    """Every kernel of every cubin (CUDA ELF image) that lies somewhere in `data`, by name.

    Args:
        data: for instance XLA's kernel cache, a protocol buffer with one cubin a kernel.
    """
    kernels: dict[str, CubinKernel] = {}
    start = data.find(_ELF_MAGIC)
    while start >= 0:
        image = memoryview(data)[start:]
        if len(image) >= 64 and struct.unpack_from("<H", image, 18)[0] == _MACHINE_CUDA:
            kernels.update((kernel.name, kernel) for kernel in _kernels_in(image))
        start = data.find(_ELF_MAGIC, start + 1)
    return kernels


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    size: int
    content: memoryview


def _kernels_in(image: memoryview) -> Iterator[CubinKernel]:
    sections = _sections(image)
    by_name = {section.name: section for section in sections}
    symbols = _symbol_names(sections)
    values = _info_values(by_name[".nv.info"].content)
    is_hopper = ".nv.shared.reserved.0" in by_name
    for (attribute, symbol), registers in values.items():
        name = symbols[symbol]
        # Device functions that were not inlined have registers, too, but no parameters.
        if attribute != _INFO_REGISTERS or f".nv.constant0.{name}" not in by_name:
            continue
        shared = by_name.get(f".nv.shared.{name}")
        shared_bytes = 0 if shared is None else shared.size - is_hopper * _RESERVED_SHARED_BYTES
        yield CubinKernel(name, registers, values.get((_INFO_FRAME_SIZE, symbol), 0), max(shared_bytes, 0))


def _sections(image: memoryview) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", image, 40)
    entry_size, count, names_index = struct.unpack_from("<3H", image, 58)
    headers = [struct.unpack_from("<2I4Q", image, table + index * entry_size) for index in range(count)]
    names = headers[names_index][4]
    sections = []
    for name, kind, _, _, offset, size in headers:
        content = image[:0] if kind == _NO_BITS else image[offset : offset + size]
        sections.append(_Section(_string(image[names:], name), kind, size, content))
    return sections


def _symbol_names(sections: list[_Section]) -> list[str]:
    (symbols,) = (section.content for section in sections if section.kind == _SYMBOL_TABLE)
    (strings,) = (section.content for section in sections if section.name == ".strtab")
    return [_string(strings, struct.unpack_from("<I", symbols, start)[0]) for start in range(0, len(symbols), 24)]


def _info_values(info: memoryview) -> dict[tuple[int, int], int]:
    """Value by (attribute, symbol index) of the attributes that have both."""
    values = {}
    position = 0
    while position + 4 <= len(info):
        layout, attribute, size = struct.unpack_from("<2BH", info, position)
        position += 4
        if layout != _INFO_WITH_SIZE:
            continue
        if size == 8:
            symbol, value = struct.unpack_from("<2I", info, position)
            values[attribute, symbol] = value
        position += size
    return values


def _string(table: memoryview, start: int) -> str:
    length = bytes(table[start : start + 1024]).index(b"\0")
    return bytes(table[start : start + length]).decode()
