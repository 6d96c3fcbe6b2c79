"""Carries out the PTX of a kernel on numpy arrays, one element a thread: what it computes, on a machine without a GPU.

It knows the instructions that our matrix products compile to, for programs whose threads all take the same branches.
Copies and products finish at once, so that it says nothing about barriers. Registers are uint64 arrays of bits.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from tests.deviceless.ptx_arithmetic import (
    ARITHMETIC,
    BFLOAT16,
    FLOAT16,
    Bits,
    bits_of,
    floats,
    halves,
    signed,
    unsigned,
)

GLOBAL = 1 << 28
"""Address of the first byte of global memory."""

LOW_32 = np.uint64(0xFFFFFFFF)
IGNORED = ("bar.", "cp.async.commit", "cp.async.wait", "wgmma.fence", "wgmma.commit", "wgmma.wait", "fence", "griddep")

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}


@dataclass(frozen=True)
class Instruction:
    predicate: str
    expected: bool
    opcode: str
    operands: tuple[str, ...]


class Kernel:
    """The entry `name` of a module.

    Attributes:
        parameters: names, in order.
        code: instructions.
        labels: the index in `code` that each stands before.
    """

    def __init__(self, ptx: str, name: str) -> None:
        text = ptx[ptx.index(f".entry {name}(") :]
        self.parameters = re.findall(rf"({name}_param_\d+)", text[: text.index(")")])
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        body = re.sub(r"//[^\n]*", "", text[text.index("{") + 1 :])
        for statement in re.split(r";|(?<=:)\s*\n", body):
            self._add(re.sub(r"^[{}\s]+(?!%)", "", " ".join(statement.split())))

    def _add(self, statement: str) -> None:
        label = re.match(r"(\$[\w$]+):\s*(.*)", statement)
        if label:
            self.labels[label[1]] = len(self.code)
            statement = label[2]
        parts = re.match(r"(?:@(!?)(%p\d+) )?([a-z][\w.:]*)\s*(.*)", statement)
        if parts:
            operands = re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", parts[4])
            self.code.append(Instruction(parts[2] or "", not parts[1], parts[3], tuple(operands)))


class Block:
    """A block of threads.

    Attributes:
        memory: bytes of global memory, uint8.
        shared: bytes of shared memory.
    """

    def __init__(self, kernel: Kernel, memory: np.ndarray, arguments: Sequence[int], threads: int, shared: int) -> None:
        self.kernel, self.memory, self.threads = kernel, memory, threads
        self.shared = np.zeros(shared, np.uint8)
        self.thread = np.arange(threads)
        self.registers: dict[str, Bits] = {"global_smem": self._all(0), "%tid.x": unsigned(self.thread)}
        for name, argument in zip(kernel.parameters, arguments, strict=True):
            self.registers[f"[{name}]"] = self._all(argument)

    def run(self, x: int, y: int) -> None:
        """As the block of this index."""
        self.registers |= {"%ctaid.x": self._all(x), "%ctaid.y": self._all(y)}
        at = 0
        while self.kernel.code[at].opcode != "ret":
            instruction = self.kernel.code[at]
            at += 1
            active = np.ones(self.threads, bool)
            if instruction.predicate:
                active = (self.registers[instruction.predicate] != 0) == instruction.expected
            if instruction.opcode.startswith("bra"):
                assert active.all() or not active.any(), "threads take different branches"
                at = self.kernel.labels[instruction.operands[0]] if active[0] else at
            elif not instruction.opcode.startswith(IGNORED):
                self._execute(instruction.opcode, instruction.operands, active)

    def _execute(self, opcode: str, operands: tuple[str, ...], active: np.ndarray) -> None:
        special: dict[str, Callable[[str, tuple[str, ...], np.ndarray], None]] = {
            "mov": self._move,
            "ld.param": self._move,
            "ld": self._load,
            "st.": self._store,
            "cp.async": self._copy,
            "ldmatrix": self._load_matrices,
            "shfl": self._shuffle,
            "mma": self._multiply,
            "wgmma.mma": self._multiply_in_groups,
            "setp": self._compare,
        }
        names = [name for name in special if opcode.startswith(name)]
        if names:
            return special[max(names, key=len)](opcode, operands, active)
        names = [name for name in ARITHMETIC if opcode.startswith(name)]
        if not names:
            raise NotImplementedError(f"{opcode} {', '.join(operands)}")
        target, *sources = operands
        result = ARITHMETIC[max(names, key=len)](*map(self._value, sources))
        wide = "64" in opcode.split(".")[1] or opcode.startswith(("mul.wide.s32", "mul.wide.u32", "cvta"))
        return self._set(target, result if wide else result & LOW_32, active)

    def _all(self, number: int) -> Bits:
        return np.full(self.threads, number, np.uint64)

    def _value(self, operand: str) -> Bits:
        if operand in self.registers:
            return self.registers[operand]
        if operand.startswith("0f"):
            return self._all(int(operand[2:], 16))
        return self._all(int(operand.rstrip("U"), 0) % (1 << 64))

    def _set(self, register: str, value: Any, active: np.ndarray) -> None:
        value = np.asarray(value).astype(np.uint64)
        self.registers[register] = (
            value if active.all() else np.where(active, value, self.registers.get(register, value))
        )

    def _address(self, operand: str) -> np.ndarray:
        base, _, offset = operand.strip("[] ").partition("+")
        return self._value(base.strip()).view(np.int64) + int(offset or 0)

    def _read(self, space: np.ndarray, where: np.ndarray, size: int) -> Bits:
        assert where.min() >= 0 and where.max() + size <= len(space), "outside of the memory"
        value = np.zeros(where.shape, np.uint64)
        for i in range(size):
            value |= space[where + i].astype(np.uint64) << np.uint64(8 * i)
        return value

    def _write(self, space: np.ndarray, where: np.ndarray, value: Bits, size: int) -> None:
        assert not len(where) or (where.min() >= 0 and where.max() + size <= len(space)), "outside of the memory"
        for i in range(size):
            space[where + i] = (value >> np.uint64(8 * i)).astype(np.uint8)

    def _move(self, opcode: str, operands: tuple[str, ...], active: np.ndarray) -> None:
        target, source = operands
        width = 32 if "64" in opcode else 16
        if source.startswith("{"):
            value = self._all(0)
            for place, name in enumerate(names_in(source)):
                value |= (self._value(name) & np.uint64((1 << width) - 1)) << np.uint64(width * place)
            self._set(target, value, active)
        elif target.startswith("{"):
            for place, name in enumerate(names_in(target)):
                part = self._value(source) >> np.uint64(width * place)
                self._set(name, part & np.uint64((1 << width) - 1), active)
        else:
            value = self._value(source)
            self._set(target, value & LOW_32 if "32" in opcode else value, active)

    def _load(self, opcode: str, operands: tuple[str, ...], active: np.ndarray) -> None:
        size = int(opcode.split(".")[-1][1:]) // 8
        space = self.shared if ".shared" in opcode else self.memory
        where = np.where(active, self._address(operands[1]) - (0 if ".shared" in opcode else GLOBAL), 0)
        for place, name in enumerate(names_in(operands[0])):
            self._set(name, self._read(space, where + size * place, size), active)

    def _store(self, opcode: str, operands: tuple[str, ...], active: np.ndarray) -> None:
        size = int(opcode.split(".")[-1][1:]) // 8
        space = self.shared if ".shared" in opcode else self.memory
        where = self._address(operands[0]) - (0 if ".shared" in opcode else GLOBAL)
        for place, name in enumerate(names_in(operands[1])):
            self._write(space, where[active] + size * place, self._value(name)[active], size)

    def _copy(self, opcode: str, operands: tuple[str, ...], active: np.ndarray) -> None:
        target, source = self._address(operands[0]), self._address(operands[1]) - GLOBAL
        size = self._value(operands[3]) if len(operands) > 3 else self._value(operands[2])
        for i in range(int(operands[2], 0)):
            there = active & (i < size)
            byte = np.where(there, self._read(self.memory, np.where(there, source + i, 0), 1), np.uint64(0))
            self._write(self.shared, target[active] + i, byte[active], 1)

    def _load_matrices(self, opcode: str, operands: tuple[str, ...], active: np.ndarray) -> None:
        assert ".trans" not in opcode and "m8n8" in opcode
        rows, lane = self._address(operands[1]), self.thread % 32
        for index, name in enumerate(names_in(operands[0])):
            row = rows[self.thread - lane + 8 * index + lane // 4]
            self._set(name, self._read(self.shared, row + 4 * (lane % 4), 4), active)

    def _shuffle(self, opcode: str, operands: tuple[str, ...], active: np.ndarray) -> None:
        lane, by = self.thread % 32, self._value(operands[2]).view(np.int64)
        source = lane ^ by if ".bfly" in opcode else by % 32
        self._set(operands[0], self._value(operands[1])[self.thread - lane + source], active)

    def _compare(self, opcode: str, operands: tuple[str, ...], active: np.ndarray) -> None:
        _, comparison, kind = opcode.split(".")
        one, other = (self._value(operand) for operand in operands[1:])
        if kind.startswith("s"):
            one, other = signed(one, int(kind[1:])), signed(other, int(kind[1:]))
        self._set(operands[0], COMPARISONS[comparison](one, other), active)

    def _gather(self, operand: str, dtype: Any, rows: int) -> np.ndarray:
        """[warps or groups, rows, 16] of a product's first operand, 16 rows a warp."""
        lane, warp = self.thread % 32, self.thread // 32
        matrix = np.zeros((self.threads * 16 // (32 * rows), rows, 16))
        for index, name in enumerate(names_in(operand)):
            row = (warp * 16) % rows + lane // 4 + 8 * (index % 2)
            column = 2 * (lane % 4) + 8 * (index // 2)
            for side, half in enumerate(halves(self._value(name), dtype)):
                matrix[warp * 16 // rows, row, column + side] = half
        return matrix

    def _multiply_bytes(self, opcode: str, operands: tuple[str, ...], active: np.ndarray) -> None:
        """Of int8, added up in int32, or of float8, in float32: 32 channels, four in a register."""
        assert "m16n8k32.row.col" in opcode
        exact = "s8.s8" in opcode
        dtype = np.int8 if exact else ml_dtypes.float8_e4m3fn
        lane, warp = self.thread % 32, self.thread // 32
        first, second = np.zeros((self.threads // 32, 16, 32)), np.zeros((self.threads // 32, 32, 8))
        for operand, (target, is_first) in zip(operands[1:3], ((first, True), (second, False)), strict=True):
            for index, name in enumerate(names_in(operand)):
                half = index // 2 if is_first else index
                for place in range(4):
                    byte = (self._value(name) >> np.uint64(8 * place) & np.uint64(0xFF)).astype(np.uint8).view(dtype)
                    channel = 4 * (lane % 4) + 16 * half + place
                    where = (lane // 4 + 8 * (index % 2), channel) if is_first else (channel, lane // 4)
                    target[warp, *where] = byte.astype(np.float64)
        product = first @ second
        for index, (name, start) in enumerate(zip(names_in(operands[0]), names_in(operands[3]), strict=True)):
            term = product[warp, lane // 4 + 8 * (index // 2), 2 * (lane % 4) + index % 2]
            before = self._value(start)
            total = unsigned(signed(before) + term.astype(np.int64)) if exact else bits_of(floats(before) + term)
            self._set(name, total & np.uint64(0xFFFFFFFF), active)

    def _multiply(self, opcode: str, operands: tuple[str, ...], active: np.ndarray) -> None:
        if "m16n8k32" in opcode:
            self._multiply_bytes(opcode, operands, active)
            return
        assert "m16n8k16.row.col.f32" in opcode
        dtype = BFLOAT16 if "bf16" in opcode else FLOAT16
        lane, warp = self.thread % 32, self.thread // 32
        second = np.zeros((self.threads // 32, 16, 8))
        for index, name in enumerate(names_in(operands[2])):
            for side, half in enumerate(halves(self._value(name), dtype)):
                second[warp, 2 * (lane % 4) + 8 * index + side, lane // 4] = half
        product = self._gather(operands[1], dtype, 16) @ second
        for index, (name, start) in enumerate(zip(names_in(operands[0]), names_in(operands[3]), strict=True)):
            term = product[warp, lane // 4 + 8 * (index // 2), 2 * (lane % 4) + index % 2]
            self._set(name, bits_of(floats(self._value(start)) + term), active)

    def _multiply_in_groups(self, opcode: str, operands: tuple[str, ...], active: np.ndarray) -> None:
        """The first operand in registers, the second in shared memory, its channels adjacent."""
        columns = int(opcode.split("m64n")[1].split("k16")[0])
        assert opcode.endswith("f32.bf16.bf16")
        first = self._gather(operands[1], BFLOAT16, 64)
        product = np.stack([part @ self._shared_operand(g, operands[2], columns) for g, part in enumerate(first)])
        lane, row = self.thread % 32, self.thread % 128 // 32 * 16
        keep = self._value(operands[3]) != 0
        for index, name in enumerate(names_in(operands[0])):
            column = 8 * (index // 4) + 2 * (lane % 4) + index % 2
            term = product[self.thread // 128, row + lane // 4 + 8 * (index % 4 // 2), column]
            self._set(name, bits_of(np.where(keep, floats(self._value(name)), 0) + term), active)

    def _shared_operand(self, group: int, descriptor: str, columns: int) -> np.ndarray:
        """[16, columns]: rows in blocks of eight, 16 bytes of a row swapped by the row's place in its block."""
        value = int(self._value(descriptor)[128 * group])
        start, block, swizzle = (value & 0x3FFF) << 4, (value >> 32 & 0x3FFF) << 4, value >> 62
        width = {1: 128, 2: 64, 3: 32}[swizzle]
        row, channel = np.arange(columns), np.arange(16)[:, None]
        where = start + row % 8 * width + row // 8 * block + 2 * channel
        where = where ^ (where >> 7 & width // 16 - 1) << 4
        return halves(self._read(self.shared, where, 2), BFLOAT16)[0]


def names_in(operand: str) -> list[str]:
    """Of a vector in braces, or the one name."""
    return [name.strip() for name in operand.strip("{}").split(",")]


def execute(
    ptx: str,
    name: str,
    arrays: Sequence[np.ndarray],
    result: np.ndarray,
    grid: Sequence[int],
    threads: int,
    shared: int,
) -> np.ndarray:
    """What a kernel writes into an array of the shape and dtype of `result`, behind its other arguments."""
    parts, addresses, size = [], [], 0
    for array in (*arrays, result):
        addresses.append(GLOBAL + size)
        parts.append(np.frombuffer(array.tobytes().ljust(-(-array.nbytes // 256) * 256, b"\xaa"), np.uint8))
        size += len(parts[-1])
    memory = np.concatenate(parts)
    for y in range(grid[1]):
        for x in range(grid[0]):
            Block(Kernel(ptx, name), memory, addresses, threads, shared).run(x, y)
    first = addresses[-1] - GLOBAL
    return memory[first : first + result.nbytes].view(result.dtype).reshape(result.shape)
