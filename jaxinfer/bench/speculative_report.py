"""Comparisons of methods of speculation as a table, and as a picture. matplotlib is imported when drawing."""

from collections.abc import Sequence
from pathlib import Path

from jaxinfer.bench.speculative import Comparison

_HEADER = (
    "method", "k", "batch", "tokens a step", "accepted by position", "draft ms", "verify ms", "plain step ms",
    "speed-up", "implied", "same outputs",
)  # fmt: skip


def markdown(comparisons: Sequence[Comparison]) -> str:
    """A table in Markdown, a row for each."""
    rows = [_HEADER, tuple("---" for _ in _HEADER), *map(_row, comparisons)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(one: Comparison) -> tuple[str, ...]:
    rates = " ".join(f"{rate:.2f}" for rate in one.rates)
    return (
        one.method,
        str(one.num_tokens),
        str(one.batch_size),
        f"{one.guessing.tokens_per_step:.2f}",
        rates or "-",
        f"{one.draft_ms:.1f}",
        f"{one.verify_ms:.1f}",
        f"{one.plain.step_ms:.1f}",
        f"{one.speedup:.2f}",
        f"{one.implied_speedup:.2f}",
        f"{one.num_same} of {len(one.plain.token_ids)}",
    )


def plot(comparisons: Sequence[Comparison], title: str, path: Path) -> None:
    """Writes a picture of the speed-up against the batch size, a line for each method and number of guesses; its format
    is told from the file's ending.

    Raises:
        RuntimeError: matplotlib is not installed; says how to install it.
        ValueError: the ending is of no known format.
        OSError: the file cannot be written.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lines: dict[str, list[Comparison]] = {}
    for one in comparisons:
        lines.setdefault(f"{one.method}, k = {one.num_tokens}", []).append(one)
    for label, members in lines.items():
        members.sort(key=lambda one: one.batch_size)
        axes.plot([one.batch_size for one in members], [one.speedup for one in members], marker="o", label=label)
    axes.axhline(1.0, color="grey", linestyle=":", label="plain decoding")
    sizes = sorted({one.batch_size for one in comparisons})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="requests at the same time", ylabel="speed-up over plain decoding", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def require_matplotlib() -> None:
    """Raises RuntimeError, which says how to install it, when it is not there."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"--plot needs matplotlib ({error}); run `pip install 'jaxinfer[plot]'` or `pip install matplotlib`"
        ) from error
