"""A batch job over a Ray cluster: Ray Data hands the lines to engines, each in an actor, and brings their results."""

import json
import logging
import re
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from jaxinfer.cluster.line_server import LINE, NUMBER, RESULT, LineServer
from jaxinfer.config import require_positive
from jaxinfer.startup.args import EngineArgs

TASKS_PER_WORKER = 4
"""Tasks that an actor works on at the same time: when one has only its longest requests left, the others fill the
steps."""
_SEQS = {False: 32, True: 1024}  # requests that run at once in an engine without / with a GPU, where nothing says more


@dataclass(frozen=True)
class RayOptions:
    """Where a batch job runs.

    Args:
        address: of a running cluster ("auto", "host:6379", "ray://..."). None or "" is what Ray chooses: the cluster
            that RAY_ADDRESS names, else the one that runs on this machine, else a new one of this machine alone, which
            ends with the job.
        num_workers: engines; None is as many as the cluster has GPUs for, and one a machine where it has no GPU.
        gpus_per_worker: GPUs of each engine; None is as many as it runs on where the cluster has any, else none.
    """

    address: str | None = None
    num_workers: int | None = None
    gpus_per_worker: int | None = None

    def __post_init__(self) -> None:
        if self.num_workers is not None:
            require_positive("num_workers", self.num_workers)
        if self.gpus_per_worker is not None and self.gpus_per_worker < 0:
            raise ValueError(f"gpus_per_worker={self.gpus_per_worker} must be at least 0")


def serve_on_ray(
    lines: Iterable[tuple[int, bytes]],
    num_lines: int,
    args: EngineArgs,
    options: RayOptions,
    model_name: str,
    chat_template: str | None = None,
) -> Generator[list[dict[str, Any]], None, None]:
    """Answers batch lines.

    Ray starts an actor that dies again, and what it had not finished is done again, by it or by another. Each line's
    result is given once, whatever Ray does.

    Args:
        lines: numbers, which differ, and the lines; read at once into the cluster's object store, which spills to disk.
        num_lines: how many there are.
        args: of every engine; the model is found, or fetched, on every machine.
        options: where the engines run.
        model_name, chat_template: as for `LineServer`.

    Yields:
        Results as soon as Ray brings them, those of a task together.

    Raises:
        ValueError: Ray is not installed, or the cluster has too few GPUs.
        ConnectionError: there is no cluster at the address.
        RuntimeError: no engine could be started, or one died of the first requests it got. What was yielded stays.
    """
    ray = _ray()
    is_ours = not ray.is_initialized()
    if is_ours:
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # what fails is raised as well
        ray.init(options.address or None, logging_level=logging.ERROR, include_dashboard=False)
    try:
        workers, gpus = _workers(ray, options, args)
        seqs = args.data_parallel_size * (args.max_num_seqs or _SEQS[gpus > 0])
        size = max(1, min(num_lines // (2 * TASKS_PER_WORKER * workers), 2 * seqs // TASKS_PER_WORKER))
        dataset = _dataset(ray, lines, size, workers, gpus, (args, model_name, chat_template))
        yield from _results(ray, dataset, num_lines)
    finally:
        if is_ours:
            ray.shutdown()


def _ray() -> Any:
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise ValueError(f"a batch over a cluster needs Ray ({error}); run `pip install 'jaxinfer[ray]'`") from error
    return ray


def _workers(ray: Any, options: RayOptions, args: EngineArgs) -> tuple[int, int]:
    """Engines, and GPUs of each.

    Raises:
        ValueError: the cluster has not that much.
    """
    resources = ray.cluster_resources()
    cpus, total = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
    gpus = options.gpus_per_worker
    if gpus is None:
        gpus = args.data_parallel_size * args.tensor_parallel_size if total else 0
    nodes = sum(node["Alive"] for node in ray.nodes())
    workers = options.num_workers or (max(1, total // gpus) if gpus else nodes)
    if workers * gpus > total or workers > cpus:
        raise ValueError(
            f"{workers} engines need {workers} CPUs and {workers * gpus} GPUs, but the Ray cluster has {cpus} and "
            f"{total}; give fewer workers or fewer GPUs for each, or start Ray with more"
        )
    return workers, gpus


def _dataset(
    ray: Any, lines: Iterable[tuple[int, bytes]], size: int, workers: int, gpus: int, constructor: tuple[Any, ...]
) -> Any:
    """The lines, `size` a task, through as many actors as there are workers."""
    import pyarrow

    tables, remaining = [], iter(lines)
    while chunk := list(islice(remaining, size)):
        numbers, texts = zip(*chunk, strict=True)
        columns = {NUMBER: pyarrow.array(numbers, pyarrow.int64()), LINE: pyarrow.array(texts, pyarrow.large_binary())}
        tables.append(ray.put(pyarrow.table(columns)))
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    return ray.data.from_arrow_refs(tables).map_batches(
        LineServer,
        fn_constructor_args=constructor,
        batch_size=None,  # a task is a table
        compute=ray.data.ActorPoolStrategy(
            size=workers,
            max_tasks_in_flight_per_actor=TASKS_PER_WORKER,
            max_concurrent_calls_per_actor=TASKS_PER_WORKER,
        ),
        num_cpus=1,
        num_gpus=gpus,
    )


def _results(ray: Any, dataset: Any, num_lines: int) -> Iterator[list[dict[str, Any]]]:
    """The results of each task. A task that is done again may give what was here already: that is left out."""
    seen: set[int] = set()
    try:
        for batch in dataset.iter_batches(batch_size=None, prefetch_batches=0):
            new = dict(zip(batch[NUMBER].tolist(), batch[RESULT], strict=True))
            results = [json.loads(result) for number, result in new.items() if number not in seen]
            seen.update(new)
            if results:
                yield results
    except (ray.exceptions.RayError, ray.data.exceptions.RayDataUserCodeException) as error:
        raise RuntimeError(f"the batch job's engines failed: {_cause(error)}") from error
    if len(seen) < num_lines:
        raise RuntimeError(f"Ray gave {len(seen)} of {num_lines} results; run the job again for the others")


def _cause(error: BaseException) -> str:
    """What happened in the worker, on one line: the last exception that Ray's text shows and that is not Ray's own."""
    lines = str(error).strip().splitlines()
    causes = [line for line in lines if re.match(r"(?!ray\.)[\w.]+(Error|Exception): ", line)]
    return causes[-1] if causes else lines[-1]
