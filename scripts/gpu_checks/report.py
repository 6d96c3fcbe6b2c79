"""The journal as a page of Markdown, ready for scripts/results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scripts.gpu_checks.journal import DROPPED, Journal

Record = Mapping[str, Any]
Column = tuple[str, Callable[[Record], str]]

TITLES = {
    "correctness": "Correctness",
    "bandwidth": "Bandwidth of large arrays",
    "paged_decode": "Paged decode attention, head dim 128, 8 KV heads, pages of 16",
    "prefill": "Causal prefill, bfloat16, 32 query and 8 KV heads of 128",
    "peers": "Others in the same run",
    "products": "Norm, gate and up projections of Llama-3-8B, bfloat16; one of them with quantised weights",
    "decode_step": "Decode step of an 8B-shaped model, bfloat16, random weights",
}


def write_summary(journal: Journal, out: Path) -> None:
    """Writes `summary.md` into the folder."""
    (out / "summary.md").write_text(as_markdown(journal))


def as_markdown(journal: Journal) -> str:
    """The whole report; of every case its newest record."""
    parts = ["# GPU check", _card(journal)]
    notes = [f"{r['stage']}: {r['why']}" for r in journal.records if r["status"] == "note"]
    for stage, title in TITLES.items():
        records = list(journal.last_of(stage).values())
        if records:
            parts += [f"## {title}", *_stage(stage, [r for r in records if r["status"] != "note"])]
    return "\n\n".join([*parts, *(f"Note: {note}." for note in notes)]) + "\n"


def case_line(record: Record) -> str:
    """One record for a person who watches."""
    words = [f"{record['case']}: {record['status']}"]
    for name, form in (
        ("us", "{:.1f} us"),
        ("gb_per_s", "{:.0f} GB/s"),
        ("share", "{:.1%} of copy"),
        ("tflop_per_s", "{:.0f} TFLOP/s"),
        ("error", "error {:.2e}"),
        ("compile_s", "compiled in {:.1f} s"),
        ("temp_mib", "temp {} MiB"),
        ("why", "({})"),
    ):
        if name in record:
            words.append(form.format(record[name]))
    return "  ".join(words)


def _card(journal: Journal) -> str:
    records = journal.last_of("card")
    lines: list[str] = []
    for record in records.values():
        for name, value in record.items():
            if name not in ("stage", "case", "status", "t", "compile_s", "run_s"):
                lines.append(f"* {record['case']} {name}: {_flat(value)}")
    return "\n".join(lines) or "The card's facts were not taken."


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {inner}" for name, inner in value.items())
    return str(value)


def _stage(stage: str, records: Sequence[Record]) -> list[str]:
    done = [r for r in records if r["status"] in ("ok", "compiled")]
    parts = []
    if stage == "correctness":
        parts.append(f"{len(done)} of {len(records)} cases agree with float64 within the tolerance of their dtype.")
        parts.append(_table([*_COMMON, _WORST], done))
    elif done:
        if stage == "products":
            done = [*map(partial(_against_bfloat16, done), done)]
        parts.append(_table([*_COMMON, *_columns(done)], done))
    shown = {record["case"] for record in done}
    others: dict[str, list[str]] = {}
    for record in records:
        if record["case"] not in shown:
            others.setdefault(record["status"], []).append(f"{record['case']} ({record.get('why', 'no end recorded')})")
    parts += [f"**{_WORDS.get(status, status)}**: {'; '.join(lines)}." for status, lines in others.items()]
    return parts


def _against_bfloat16(records: Sequence[Record], record: Record) -> Record:
    """With how many times as fast it is as the product of as many tokens in bfloat16, and the goal."""
    name = f"bf16 M{record.get('tokens')}"
    plain = next((other["us"] for other in records if other["case"] == name and "us" in other), None)
    if plain is None or "us" not in record or record["case"] == name or record["case"].startswith(("norm", "XLA")):
        return record
    goal = f" (goal {record['goal']:g})" if "goal" in record else ""
    return {**record, "over_bf16": f"{plain / record['us']:.2f}{goal}"}


_WORDS = {DROPPED: "Dropped", "begin": "Cut off", "failed": "FAILED", "crashed": "CRASHED", "skipped": "Skipped"}


def _number(name: str, form: str) -> Callable[[Record], str]:
    return lambda record: form.format(record[name]) if name in record else "-"


def _spread(record: Record) -> str:
    if "us" not in record:
        return "-"
    return f"{record['us']:.1f} ({record['us_least']:.1f} to {record['us_most']:.1f})"


_COMMON: list[Column] = [("case", lambda record: str(record["case"]))]
_WORST: Column = ("error / tolerance", _number("of_tolerance", "{:.2f}"))
_MEASURED: list[tuple[str, Column]] = [
    ("us", ("us: median (least to most)", _spread)),
    ("gb_per_s", ("GB/s", _number("gb_per_s", "{:.0f}"))),
    ("share", ("of copy bandwidth", _number("share", "{:.1%}"))),
    ("tflop_per_s", ("TFLOP/s", _number("tflop_per_s", "{:.0f}"))),
    ("over_bf16", ("times bfloat16's speed", _number("over_bf16", "{}"))),
    ("tokens_per_s", ("tok/s", _number("tokens_per_s", "{:.0f}"))),
    ("error", ("relative error", _number("error", "{:.1e}"))),
    ("kernel_calls", ("calls of our kernels", _number("kernel_calls", "{}"))),
    ("temp_mib", ("temp MiB", _number("temp_mib", "{}"))),
    ("compile_s", ("compile s", _number("compile_s", "{:.1f}"))),
]


def _columns(records: Iterable[Record]) -> list[Column]:
    """The columns that some record has a value for."""
    records = list(records)
    return [column for name, column in _MEASURED if any(name in record for record in records)]


def _table(columns: Sequence[Column], records: Sequence[Record]) -> str:
    rows = [[title for title, _ in columns], ["---"] * len(columns)]
    rows += [[value(record) for _, value in columns] for record in records]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
