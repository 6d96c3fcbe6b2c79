"""Cubins as nvcc and XLA write them, built here by hand: two kernels, a device function, and bytes around them."""

import struct

import pytest

from jaxinfer.planning.kernel_resources import CubinKernel, KernelResources, kernels_of, read_cubins
from jaxinfer.planning.xla_dump import Launch

FRAME, MIN_STACK, REGISTERS = 0x11, 0x12, 0x2F
SYMBOLS = ("", "attend", "write", "device_function")


def info(attribute: int, symbol: int, value: int) -> bytes:
    return struct.pack("<2BH2I", 4, attribute, 8, symbol, value)


def cubin(info_bytes: bytes, static_shared: dict[str, int], reserved: bool, machine: int = 190) -> bytes:
    """An ELF image with the sections that matter, for the kernels "attend" and "write"."""
    strings = b"".join(name.encode() + b"\0" for name in SYMBOLS)
    starts = [strings.index(name.encode() + b"\0") for name in SYMBOLS]
    symbols = b"".join(struct.pack("<I20x", start) for start in starts)
    sections = [("", 0, b"", 0), (".strtab", 3, strings, 0), (".symtab", 2, symbols, 0)]
    sections += [(".nv.info", 0x70000000, info_bytes, 0)]
    sections += [(f".nv.constant0.{name}", 1, b"\0" * 16, 0) for name in ("attend", "write")]
    sections += [(f".nv.shared.{name}", 8, b"", size) for name, size in static_shared.items()]
    if reserved:
        sections.append((".nv.shared.reserved.0", 8, b"", 0))
    names = b"".join(name.encode() + b"\0" for name, *_ in sections) + b".shstrtab\0"
    sections.append((".shstrtab", 3, names, 0))
    body, headers = b"", b""
    for name, kind, content, size in sections:
        start = names.index(name.encode() + b"\0")
        headers += struct.pack("<2I6Q", start, kind, 0, 0, 64 + len(body), size or len(content), 0, 0)[:40] + b"\0" * 24
        body += content
    end = 64 + len(body)
    identity = struct.pack("<4s5B7x", b"\x7fELF", 2, 1, 1, 51, 7)
    elf = identity + struct.pack(
        "<2HI3QI6H", 2, machine, 1, 0, 0, end, 0, 64, 0, 0, 64, len(sections), len(sections) - 1
    )
    return elf + body + headers


ATTEND_AND_WRITE = (
    bytes([1, 0x50, 0, 0])  # an attribute without a value
    + info(REGISTERS, 1, 168)
    + info(FRAME, 1, 48)
    + info(MIN_STACK, 1, 64)
    + info(REGISTERS, 2, 32)
    + info(REGISTERS, 3, 24)
)


@pytest.mark.parametrize("reserved", [False, True], ids=["ampere", "hopper"])
def test_kernels_of_a_cubin(reserved: bool) -> None:
    shared = {"attend": 256 + 1024 * reserved, "write": 1024} if reserved else {"attend": 256}
    data = b"\x0a\x07some key\x12" + cubin(ATTEND_AND_WRITE, shared, reserved) + b"\x0a\x00"
    assert read_cubins(data) == {
        "attend": CubinKernel("attend", registers=168, stack_bytes=48, shared_bytes=256),
        "write": CubinKernel("write", registers=32, stack_bytes=0, shared_bytes=0),
    }


def test_several_cubins_in_one_file() -> None:
    first = cubin(info(REGISTERS, 1, 40), {}, False)
    second = cubin(info(REGISTERS, 2, 50), {}, False)
    assert {k.name: k.registers for k in read_cubins(first + b"between" + second).values()} == {
        "attend": 40,
        "write": 50,
    }


def test_other_machines_and_cut_files_are_passed_over() -> None:
    assert read_cubins(cubin(ATTEND_AND_WRITE, {}, False, machine=62)) == {}
    assert read_cubins(b"\x7fELF\x02\x01") == {}
    assert read_cubins(b"") == {}


def test_kernels_are_counted_by_launch() -> None:
    launches = (
        Launch("CustomKernel", "attend", True, (8, 32, 1), 128, 36864),
        Launch("Gemm", "cublas", True),
        Launch("CustomKernel", "attend", True, (8, 32, 1), 128, 36864),
    )
    cubins = {"attend": CubinKernel("attend", 168, 0, 256), "write": CubinKernel("write", 32, 0, 0)}
    assert kernels_of(launches, cubins) == (KernelResources("attend", 2, (8, 32, 1), 128, 168, 0, 37120),)
