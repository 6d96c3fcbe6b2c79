"""Everything that happened, a JSON object a line, on disk at once: a run that is cut off leaves its results."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BEGIN = "begin"
ENDS = ("ok", "failed", "skipped", "compiled", "crashed")
"""Statuses that settle a case; it is not tried again."""
DROPPED = "dropped"
"""No time or no room was left for a case; it may be tried again."""


class Journal:
    """The records of a run, old ones included where the file has some.

    A record has ``stage``, ``case``, ``status`` and ``t`` (seconds since the epoch), and whatever was measured.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        if path.exists():
            self.records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def add(self, stage: str, case: str, status: str, **values: Any) -> dict[str, Any]:
        """Appends a record and returns it."""
        record = {"stage": stage, "case": case, "status": status, "t": round(time.time(), 2)} | values
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def is_settled(self, stage: str, case: str) -> bool:
        """Whether the case has an end."""
        return any(r["status"] in ENDS for r in self.of(stage) if r["case"] == case)

    def of(self, stage: str, *statuses: str) -> Iterator[dict[str, Any]]:
        """The records of a stage, of these statuses or of all."""
        for record in self.records:
            if record["stage"] == stage and (not statuses or record["status"] in statuses):
                yield record

    def last_of(self, stage: str) -> dict[str, dict[str, Any]]:
        """The newest record of every case of a stage, in the order in which the cases first came."""
        return {record["case"]: record for record in self.of(stage)}

    def unfinished(self) -> list[dict[str, Any]]:
        """The cases that began and have no end: what ran when a process died."""
        last = {(record["stage"], record["case"]): record for record in self.records}
        return [record for record in last.values() if record["status"] == BEGIN]
