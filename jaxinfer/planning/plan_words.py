"""Why a plan is what it is, and what would make a plan where there is none, in words. Never imports JAX."""

from collections.abc import Iterator
from dataclasses import replace

from jaxinfer.planning.candidates import MAX_GPUS, Question, best_plan, candidates, splits
from jaxinfer.planning.gpu_names import NamedGPU
from jaxinfer.planning.gpu_specs import GPU_SPECS
from jaxinfer.planning.memory_plan import MemoryPlan, mean_tokens, memory_plan, most_seqs, needed_blocks
from jaxinfer.planning.roofline import Roofline

LARGEST_SPLIT = 64
_PLAIN = ("fp16", "bf16")


def gigabytes(num_bytes: float) -> str:
    """In the units in which cards are sold."""
    return f"{num_bytes / 1e9:.1f} GB"


def reasons(question: Question, plan: MemoryPlan, roofline: Roofline) -> Iterator[str]:
    """One sentence a decision."""
    setting = plan.setting
    if question.gpu.guessed:
        yield f"the name says nothing of the memory: taken for the {setting.gpu.device_name}"
    share = f"{setting.utilization:.0%} of each {setting.gpu.device_name}"
    yield f"weights in {setting.quant} take {gigabytes(plan.weights)} of the {gigabytes(plan.budget)} that are {share}"
    yield from _of_devices(question, plan)
    yield from _of_precision(question, plan)
    yield from _of_requests(question, plan)
    memory, compute = roofline.memory_seconds(setting.gpu), roofline.compute_seconds(setting.gpu)
    bound = "reading memory" if memory >= compute else "arithmetic"
    yield f"a decode step of {_count(setting.max_seqs)} is bound by {bound}: {max(memory, compute) * 1e3:.1f} ms"


def refusal(question: Question) -> str:
    """What does not fit, and what would."""
    setting = question.setting
    counts = question.device_counts
    if not counts:
        return f"{question.model.name} cannot be split over the {question.num_gpus} GPUs there are"
    tp = counts[-1]
    tightest = [memory_plan(replace(way, max_seqs=1)) for way in candidates(question, tp)]
    smallest = min(tightest, key=lambda plan: plan.weights)
    where = f"{tp} x {question.gpu.name}" if tp > 1 else question.gpu.name
    text = (
        f"{question.model.name} with a context of {setting.context} tokens does not fit on {where}: in "
        f"{smallest.setting.quant} the weights of each GPU take {gigabytes(smallest.weights)} of "
        f"{gigabytes(smallest.budget)}, a step {gigabytes(smallest.step.total)}"
    )
    remedies = list(_remedies(question, tightest))
    return f"{text}. What fits: {'; '.join(remedies)}" if remedies else f"{text}. No GPU known here holds it"


def _of_devices(question: Question, plan: MemoryPlan) -> Iterator[str]:
    setting = plan.setting
    if setting.tp > 1 and question.tp is None:
        least = min(way.weight_bytes for way in candidates(question, 1))
        why = f"on one the smallest weights would take {gigabytes(least)}"
        if least < plan.budget:
            why = "fewer would have no room for what was asked"
        yield f"{setting.tp} GPUs: {why}"
    spare = (question.num_gpus or 0) // setting.tp - 1
    if spare > 0 and question.tp is None:
        yield f"{setting.tp} of {question.num_gpus} GPUs are used: the others have room for {spare} more such engines"


def _of_precision(question: Question, plan: MemoryPlan) -> Iterator[str]:
    setting = plan.setting
    names = []
    if setting.quant not in _PLAIN and question.fixed_quant is None:
        names.append(f"weights in {setting.quant}")
    if setting.kv_dtype != "auto" and question.kv_dtype is None:
        names.append(f"a cache in {setting.kv_dtype}")
    if not names:
        return
    plain = replace(setting, quant=question.fixed_quant or "fp16", kv_dtype=question.kv_dtype or "auto")
    held = most_seqs(replace(plain, max_seqs=question.setting.max_seqs))
    weights = f"weights of {gigabytes(memory_plan(plain).weights)}"
    if held is None:
        why = f"{weights} would leave no room for a request of {setting.context} tokens"
    elif held.setting.max_seqs < setting.max_seqs:
        why = f"{_count(held.setting.max_seqs)} of up to {setting.context} tokens would fit"
    else:
        why = f"{weights} would leave next to no room"
    yield f"{' and '.join(names)}: in 16 bits {why}"


def _of_requests(question: Question, plan: MemoryPlan) -> Iterator[str]:
    setting = plan.setting
    full = (plan.num_blocks - 1) // (needed_blocks(replace(setting, max_seqs=1)) - 1)
    yield (
        f"the cache holds {plan.kv_tokens:,} tokens: {_count(full)} of the whole context, or {setting.max_seqs} at "
        f"different points of theirs ({mean_tokens(setting):,} tokens on average)"
    )
    wanted = question.setting.max_seqs
    if setting.max_seqs < wanted:
        yield f"{setting.max_seqs} of the {wanted} requests run at a time, the others wait"


def _remedies(question: Question, tightest: list[MemoryPlan]) -> Iterator[str]:
    """Changes of one thing each with which the question has an answer."""
    longest = max(tightest, key=lambda plan: plan.kv_tokens)
    if longest.kv_tokens:
        yield f"a context of up to {longest.kv_tokens} tokens with {_ways(longest)}"
    if question.quant or question.kv_dtype:
        plan = best_plan(replace(question, quant=None, kv_dtype=None))
        if plan is not None:
            yield f"{_ways(plan)} on {_times(plan.setting.tp, question.gpu.name)}"
    first = (question.tp or question.num_gpus or MAX_GPUS) + 1
    for count in range(first, LARGEST_SPLIT + 1):
        if splits(question.model.config, count):
            plan = best_plan(replace(question, num_gpus=count, tp=count))
            if plan is not None:
                yield f"{_times(count, question.gpu.name)} with {_ways(plan)}"
                break
    larger = []
    for name, spec in GPU_SPECS.items():
        if spec.memory_bytes > question.setting.gpu.memory_bytes and (
            best_plan(replace(question, gpu=NamedGPU(name, spec, None), setting=replace(question.setting, gpu=spec)))
        ):
            larger.append(name)
    if larger:
        yield f"as many of {', '.join(larger)}"


def _count(requests: int) -> str:
    return "1 request" if requests == 1 else f"{requests} requests"


def _ways(plan: MemoryPlan) -> str:
    cache = "16 bits" if plan.setting.kv_dtype == "auto" else plan.setting.kv_dtype
    return f"weights in {plan.setting.quant} and the cache in {cache}"


def _times(count: int, name: str) -> str:
    return f"{count} x {name}"
