"""The numbers of a run, step by step: JSON lines while it runs, then CSV and a picture."""

import csv
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

LOG = "training_log.jsonl"
TABLE = "training_log.csv"
PICTURE = "loss.png"
Entry = dict[str, float]


class TrainingLog:
    """A file of one JSON object a line, each with "step" and what was measured after it.

    Args:
        path: where it is; what it holds of later steps than `step` is dropped, as steps that will be done again.
        step: what the run goes on from.
    """

    def __init__(self, path: Path, step: int) -> None:
        self._path = path
        self.entries: list[Entry] = []
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    entry = json.loads(line)
                except ValueError:
                    break  # the process was killed while it wrote
                if entry["step"] <= step:
                    self.entries.append(entry)
        path.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries), encoding="utf-8")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Notes what was measured after so many steps."""
        entry = {"step": step, **{name: float(value) for name, value in values.items()}}
        self.entries.append(entry)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")


def write_table(entries: Iterable[Entry], path: Path) -> None:
    """The entries as CSV; a value that was not measured after a step is left empty."""
    entries = list(entries)
    columns = list(dict.fromkeys(name for entry in entries for name in entry))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(entries)


def write_curves(entries: Iterable[Entry], title: str, folder: Path) -> None:
    """Writes `TABLE` and `PICTURE` into a folder; without matplotlib no picture, and a warning that says so."""
    entries = list(entries)
    write_table(entries, folder / TABLE)
    try:
        plot_curves(entries, title, folder / PICTURE)
    except RuntimeError as error:
        warnings.warn(f"{PICTURE} was not drawn: {error}", stacklevel=2)


def plot_curves(entries: Iterable[Entry], title: str, path: Path) -> None:
    """Draws the loss, and what was measured on held-out text beside it: losses, the share of guesses that are right
    ("eval_top1..."), and tokens a step ("eval_length"), as far as the entries have them.

    Raises:
        RuntimeError: matplotlib is not installed; says how to install it.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            f"the picture of the loss needs matplotlib ({error}); run `pip install 'jaxinfer[plot]'`"
        ) from error
    entries = list(entries)
    held_out = list(dict.fromkeys(name for entry in entries for name in entry if name.startswith("eval_")))
    panels: dict[str, list[str]] = {"loss": ["loss"]}
    for name in held_out:
        kind = "tokens a step" if name == "eval_length" else "right guesses" if "top1" in name else "held-out loss"
        panels.setdefault(kind, []).append(name)
    figure = Figure(figsize=(4 + 4 * len(panels), 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for place, (kind, names) in zip(axes, panels.items(), strict=True):
        for name in names:
            points = [(entry["step"], entry[name]) for entry in entries if name in entry]
            place.plot(*zip(*points, strict=True), label=name, marker="." if len(points) < 50 else None)
        place.set(xlabel="step", ylabel=kind, title=title)
        place.legend()
    figure.savefig(path, dpi=120)
