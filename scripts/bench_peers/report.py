"""The result of bench_offline.py: medians, ranges and ratios, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from scripts.bench_peers.workloads import Workload

DISTURBING_LOAD = 0.1


@dataclass(frozen=True)
class Measurement:
    """One run. `other_load` is the share of the machine that something else used meanwhile, 0 to 1."""

    engine: str
    workload: str
    round_number: int
    tokens_per_second: float
    seconds: float
    prefill_seconds: float | None
    other_load: float
    token_ids: list[list[int]]


@dataclass
class Comparison:
    """Everything measured; the first of `engines` is the one that the others are compared with."""

    machine: dict[str, str]
    engines: list[str]
    workloads: list[Workload]
    num_rounds: int
    facts: dict[str, dict[str, str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    untimed: list[str] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)

    def add(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)

    def by_round(self, engine: str, workload: Workload) -> dict[int, Measurement]:
        """The runs of `engine` on `workload`, by round number."""
        return {m.round_number: m for m in self.measurements if (m.engine, m.workload) == (engine, workload.name)}

    def speeds(self, engine: str, workload: Workload) -> list[float]:
        """tok/s, one a round."""
        return [m.tokens_per_second for m in self.by_round(engine, workload).values()]

    def ratios(self, engine: str, workload: Workload) -> list[float]:
        """Speed of the first engine over that of `engine`, one for each round that both finished."""
        own, theirs = self.by_round(self.engines[0], workload), self.by_round(engine, workload)
        return [own[i].tokens_per_second / theirs[i].tokens_per_second for i in own if i in theirs]

    def equal_outputs(self, engine: str, workload: Workload) -> tuple[int, int]:
        """(outputs of `engine` whose ids are all equal to the first engine's, outputs compared)."""
        own, theirs = self.by_round(self.engines[0], workload), self.by_round(engine, workload)
        pairs = [
            (ours, other)
            for i in own
            if i in theirs
            for ours, other in zip(own[i].token_ids, theirs[i].token_ids, strict=True)
        ]
        return sum(ours == other for ours, other in pairs), len(pairs)


def as_markdown(comparison: Comparison) -> str:
    """The whole report."""
    engines, workloads = comparison.engines, comparison.workloads
    peers = engines[1:]
    parts = ["# Offline speed", _bullets(comparison.machine)]
    parts += ["## Engines", "\n".join(f"* **{name}**: {_facts(comparison, name)}" for name in engines)]
    parts += [f"## tok/s: median of {comparison.num_rounds} rounds (least to most)"]
    speeds = [[w.title, *(_range(comparison.speeds(e, w), 1) for e in engines)] for w in workloads]
    parts += [_table(["workload", *engines], speeds)]
    if peers:
        parts += [f"## {engines[0]} / peer: median of the ratios of each round (least to most)"]
        ratios = [[w.name, *(_range(comparison.ratios(e, w), 2) for e in peers)] for w in workloads]
        parts += [_table(["workload", *peers], ratios)]
        parts += [f"## Outputs whose greedy ids all equal {engines[0]}'s"]
        equal = [[w.name, *(_equal(comparison, e, w) for e in peers)] for w in workloads]
        parts += [_table(["workload", *peers], equal)]
    loads = [m.other_load for m in comparison.measurements]
    if loads:
        parts += [f"Other work on these cores during the runs: median {median(loads):.0%}, worst {max(loads):.0%}."]
        if max(loads) > DISTURBING_LOAD:
            parts += ["**Not a quiet machine**: engines that meet at thread barriers lose far more than that share."]
    parts += [f"Not timed: {message}" for message in comparison.untimed]
    parts += [f"**{name} failed**: {message}" for name, message in comparison.failures.items()]
    return "\n\n".join(parts)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The report and every run; token ids are left out."""
    engines = comparison.engines
    return {
        "machine": comparison.machine,
        "engines": {name: comparison.facts.get(name, {}) for name in engines},
        "failures": comparison.failures,
        "untimed": comparison.untimed,
        "workloads": {
            workload.name: {
                "title": workload.title,
                "median_tokens_per_second": {e: _median(comparison.speeds(e, workload)) for e in engines},
                "median_ratio": {e: _median(comparison.ratios(e, workload)) for e in engines[1:]},
                "equal_outputs": {e: list(comparison.equal_outputs(e, workload)) for e in engines[1:]},
            }
            for workload in comparison.workloads
        },
        "runs": [
            {name: value for name, value in vars(m).items() if name != "token_ids"} for m in comparison.measurements
        ],
    }


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _range(values: Sequence[float], digits: int) -> str:
    if not values:
        return "-"
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _equal(comparison: Comparison, engine: str, workload: Workload) -> str:
    equal, compared = comparison.equal_outputs(engine, workload)
    return f"{equal} of {compared}" if compared else "-"


def _facts(comparison: Comparison, engine: str) -> str:
    facts = comparison.facts.get(engine, {})
    return ", ".join(f"{name} {value}" for name, value in facts.items()) or "did not start"


def _bullets(facts: dict[str, str]) -> str:
    return "\n".join(f"* {name}: {value}" for name, value in facts.items())


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
