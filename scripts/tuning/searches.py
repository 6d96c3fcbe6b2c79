"""What is searched: for every entry of a table its candidates and the shapes that decide."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pallas_kernels.flash_attention import measured as flash_tables
from pallas_kernels.paged_attention import measured as paged_tables
from pallas_kernels.paged_attention.split_plan import PART
from pallas_kernels.quantized_matmul import measured as quantized_tables
from scripts.gpu_checks import paged_decode, prefill, quantized_products
from scripts.gpu_checks.case import Case
from scripts.gpu_checks.paged_decode import Decode
from scripts.gpu_checks.prefill import Prefill
from scripts.gpu_checks.quantized_products import Packed
from scripts.gpu_checks.session import Session

FORMATS = ("bf16", "int8", "fp8", "int4")


@dataclass(frozen=True)
class Search:
    """One entry of a table.

    Attributes:
        name: for a person.
        module, table, key: which entry of which table of which `measured` module.
        candidates: values of the entry.
        cases: makes the cases whose times decide, freshly traced; the geometric mean counts.
    """

    name: str
    module: ModuleType
    table: str
    key: Any
    candidates: tuple[tuple[Any, ...], ...]
    cases: Callable[[], list[Case]]


def searches(session: Session, kind: str, kernels: Iterable[str], head_dims: Iterable[int]) -> list[Search]:
    """Everything asked for, decode before prefill, and last what does not depend on the head dim.

    Args:
        session: of the run.
        kind: the device's, as it stands in the tables.
        kernels: some of "decode", "split", "prefill", "flash" and "quantized".
        head_dims: H, each.
    """
    makers: dict[str, Callable[[Session, str, int], list[Search]]] = {
        "decode": _decode,
        "split": _split,
        "prefill": _prefill,
        "flash": _flash,
    }
    chosen = set(kernels)
    found = [
        search
        for kernel, make in makers.items()
        if kernel in chosen
        for head_dim in head_dims
        for search in make(session, kind, head_dim)
    ]
    return found + (_quantized(session, kind) if "quantized" in chosen else [])


def _grid(session: Session, *axes: tuple[Any, ...]) -> tuple[tuple[Any, ...], ...]:
    """All combinations; of a rehearsal only one."""
    return tuple(itertools.product(*axes))[: 1 if session.options.rehearse else None]


def _decode(session: Session, kind: str, head_dim: int) -> list[Search]:
    """Tiles of one matrix instruction's height, for every format of the pages."""
    candidates = _grid(session, (16,), (64, 32, 128), (4, 2, 8), (5, 3, 4, 7), (False,))

    def search(kv: str) -> Search:
        decode = _shape(session, Decode(64, 8192, kv=kv, head_dim=head_dim))
        key = (kind, 16, head_dim, str(decode.dtype))
        return Search(
            f"decode H{head_dim} {kv}",
            paged_tables,
            "TILES",
            key,
            candidates,
            lambda: [paged_decode.decode_case(session, decode)],
        )

    return [search(kv) for kv in (FORMATS[1:2] if session.options.rehearse else FORMATS)]


def _split(session: Session, kind: str, head_dim: int) -> list[Search]:
    """How finely contexts are cut; long ones alone, many short ones and uneven ones all count."""
    decodes = [Decode(1, 32768, head_dim=head_dim), Decode(16, 1024, head_dim=head_dim)]
    decodes.append(Decode(64, 8192, spread=True, head_dim=head_dim))
    shapes = [_shape(session, decode) for decode in (decodes[:1] if session.options.rehearse else decodes)]
    candidates = _grid(session, (2, 4, 8), (128, 256, 512))
    cases = lambda: [paged_decode.decode_case(session, shape) for shape in shapes]  # noqa: E731
    return [Search(f"split H{head_dim}", paged_tables, "PIECES", kind, candidates, cases)]


def _prefill(session: Session, kind: str, head_dim: int) -> list[Search]:
    """Tiles of many rows, in bfloat16."""
    shape = prefill.REHEARSAL[0] if session.options.rehearse else Prefill(2, 8192, head_dim=head_dim)
    rows = 64 if session.options.rehearse or head_dim > 128 else 128
    candidates = _grid(session, tuple(sorted({rows, PART})), (64, 32, 128), (4, 8), (3, 4, 5), (True, False))
    key = (kind, rows, shape.head_dim, "bfloat16")
    cases = lambda: [prefill.paged_case(session, shape)]  # noqa: E731
    return [Search(f"prefill H{head_dim}", paged_tables, "TILES", key, candidates, cases)]


def _flash(session: Session, kind: str, head_dim: int) -> list[Search]:
    """Forward, then the two kernels of the backward pass, each with what was found for the ones before."""
    shape = prefill.REHEARSAL[0] if session.options.rehearse else Prefill(4, 4096, head_dim=head_dim)
    key = (kind, max(64, 1 << (head_dim - 1).bit_length()))
    candidates = _grid(session, (128, 64), (64, 128, 32), (8, 4), (2, 3, 4))
    forward = lambda: [prefill.flash_case(session, shape)]  # noqa: E731
    backward = lambda: [prefill.gradient_case(session, shape)]  # noqa: E731
    tables = (("FORWARD", forward), ("DQ", backward), ("DKV", backward))
    return [Search(f"flash {t} H{head_dim}", flash_tables, t, key, candidates, cases) for t, cases in tables]


def _quantized(session: Session, kind: str) -> list[Search]:
    """Tiles of few, some and many tokens; the narrower product of a layer counts as the wide one does."""
    few = _grid(session, (128, 64), (4, 2, 8), (4, 3, 6), (2, 4, 6))
    many = _grid(session, (128, 64, 256), (8, 4), (4, 3), (1, 2))

    def search(bits: int, tokens: int, timed: int) -> Search:
        group = 128 if bits == 4 else 32
        sizes = ((64, 96),) if session.options.rehearse else ((4096, 14336), (4096, 4096))
        shapes = [Packed(timed, bits, min(group, channels), channels=channels, out=out) for channels, out in sizes]
        return Search(
            f"quantized {bits} bits M{timed}",
            quantized_tables,
            "TILES",
            (kind, bits, tokens),
            few if tokens <= 32 else many,
            lambda: [quantized_products.packed_case(session, shape) for shape in shapes],
        )

    wanted = [(bits, tokens, timed) for bits in (4, 8) for tokens, timed in ((16, 16), (32, 32), (64, 64), (128, 4096))]
    return [search(*one) for one in (wanted[:1] if session.options.rehearse else wanted)]


def _shape(session: Session, decode: Decode) -> Decode:
    """A tiny one in a rehearsal."""
    if not session.options.rehearse:
        return decode
    return Decode(3, 40, 4, decode.kv, spread=decode.spread, kv_heads=2, head_dim=decode.head_dim)
