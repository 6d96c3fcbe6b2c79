"""A picture of a plan: memory against context length, with the card's limit. matplotlib is imported when drawing."""

from dataclasses import dataclass, replace
from pathlib import Path

from jaxinfer.planning.memory_plan import MemoryPlan, memory_plan

POINTS = 64
_CACHES = ("auto", "int8", "int4")


@dataclass(frozen=True)
class ContextCurve:
    """Bytes on each GPU over the context, with a cache of what `max_seqs` requests need and no more.

    Attributes:
        kv_dtype: of the cache.
        contexts: tokens of the longest request.
        num_bytes: for each of them.
    """

    kv_dtype: str
    contexts: tuple[int, ...]
    num_bytes: tuple[int, ...]


def context_curves(plan: MemoryPlan) -> tuple[ContextCurve, ...]:
    """A curve for each way to store the cache, from none to the model's longest context or four times the plan's."""
    setting = plan.setting
    longest = min(setting.model.max_position_embeddings, max(4 * setting.context, 32768))
    contexts = tuple(max(longest * point // POINTS, 1) for point in range(POINTS + 1))
    curves = []
    for kv_dtype in dict.fromkeys((setting.kv_dtype, *_CACHES)):
        other = memory_plan(replace(setting, kv_dtype=kv_dtype))
        curves.append(ContextCurve(kv_dtype, contexts, tuple(map(other.with_context, contexts))))
    return tuple(curves)


def plot_plan(plan: MemoryPlan, title: str, path: Path) -> None:
    """Writes the picture; its format is told from the file's ending, PNG without one.

    Raises:
        RuntimeError: matplotlib is not installed; says how to install it.
        ValueError: the ending is of no known format.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError(
            f"--plot needs matplotlib ({error}); run `pip install 'jaxinfer[plot]'` or `pip install matplotlib`"
        ) from error
    setting = plan.setting
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for curve in context_curves(plan):
        label = f"{setting.max_seqs} requests, {'16-bit' if curve.kv_dtype == 'auto' else curve.kv_dtype} cache"
        axes.plot(curve.contexts, [size / 1e9 for size in curve.num_bytes], label=label)
    gpu = setting.gpu
    axes.axhline(plan.weights / 1e9, color="grey", linestyle=":", label=f"weights in {setting.quant}")
    axes.axhline(gpu.memory_bytes / 1e9, color="black", label=f"{gpu.device_name}: {gpu.memory_bytes / 1e9:.1f} GB")
    axes.axhline(plan.budget / 1e9, color="black", linestyle="--", label=f"{setting.utilization:.0%} of it")
    axes.axvline(setting.context, color="grey", linewidth=0.8)
    axes.set(xlabel="context of the longest request, tokens", ylabel="memory of each GPU, GB", title=title)
    axes.set_ylim(0, 1.5 * gpu.memory_bytes / 1e9)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
