"""The ways in which a model could be served, and the best of those that fit. Never imports JAX."""

from dataclasses import dataclass, replace

from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.gpu_names import NamedGPU
from jaxinfer.planning.gpu_specs import FP8_CAPABILITY
from jaxinfer.planning.memory_plan import MemoryPlan, Setting, memory_plan, most_seqs
from jaxinfer.planning.planned_model import PlannedModel

MAX_GPUS = 8
"""Of one machine, where nothing is said about their number."""
TIGHT_SHARE = 0.9
"""Weights that take more of the budget leave too little for a cache worth having, and for what no formula sees."""
SPLIT_ROOM = 5 << 30
"""Bytes that have to be left beside the weights on each of several GPUs, which also hold buffers to talk to each other:
with less than that weights of fewer bits, or more GPUs, are the better choice."""
SMALL_SHARE = 0.25
"""Weights that take less of the budget in 16 bits stay there: 4 bits would hold a quarter more requests at the most."""
FOUR_BIT_CACHE = "int4"


@dataclass(frozen=True)
class Question:
    """What was asked, checked.

    Attributes:
        gpu: the card.
        model: the model.
        setting: of one GPU in 16 bits, with all the requests that are to run at a time.
        num_gpus: how many there are; None for as many as it takes.
        tp: GPUs to use, exactly; None for a choice.
        quant: format of the weights that was asked for; None for the checkpoint's own or a choice.
        kv_dtype: of the cache; None for a choice.
    """

    gpu: NamedGPU
    model: PlannedModel
    setting: Setting
    num_gpus: int | None = None
    tp: int | None = None
    quant: str | None = None
    kv_dtype: str | None = None

    @property
    def fixed_quant(self) -> str | None:
        """The format that the weights have whatever is chosen: asked for, or the checkpoint's; None for a choice."""
        return self.quant or self.model.quant

    @property
    def device_counts(self) -> tuple[int, ...]:
        """Numbers of GPUs to try, ascending: what was given or powers of two, where the model can be split so."""
        if self.tp:
            return (self.tp,)
        most = self.num_gpus or MAX_GPUS
        counts = range(1, most + 1) if self.num_gpus else (1 << power for power in range(most.bit_length()))
        return tuple(count for count in counts if splits(self.model.config, count))


def splits(model: ModelConfig, tp: int) -> bool:
    """Whether the layers can be split over `tp` GPUs, and without a KV head on several of them."""
    return model.num_attention_heads % tp == 0 and model.num_key_value_heads % tp == 0


def candidates(question: Question, tp: int) -> tuple[Setting, ...]:
    """Ways to store weights and cache on `tp` GPUs, the least lossy first; what was given stays.

    The first step from 16 bits to 8 is taken where more is gained: at the weights if these are more than half of what
    there is, otherwise at the cache.
    """
    setting = replace(question.setting, tp=tp)
    eight = "fp8" if setting.gpu.compute_capability >= FP8_CAPABILITY else "int8"
    plain = memory_plan(replace(setting, max_seqs=1))
    first = [("fp16", "int8"), (eight, "auto")]
    if plain.weights > plain.budget / 2:
        first.reverse()
    ways = [("fp16", "auto"), *first, (eight, "int8"), ("awq", "auto"), ("awq", "int8"), ("awq", FOUR_BIT_CACHE)]
    if plain.weights <= SMALL_SHARE * plain.budget:
        ways = [("fp16", "auto"), ("fp16", "int8"), ("fp16", FOUR_BIT_CACHE)]
    ways = [(question.fixed_quant or quant, question.kv_dtype or kv) for quant, kv in ways]
    setting = replace(setting, stored=None if question.quant else question.model.stored)
    return tuple(replace(setting, quant=quant, kv_dtype=kv) for quant, kv in dict.fromkeys(ways))


def best_plan(question: Question) -> MemoryPlan | None:
    """The plan to recommend; None where nothing fits.

    Of GPUs whose number was not given the fewest on which there is a plan with room; then the least lossy way that
    holds all the requests, on as few GPUs as do; if none does, the one that holds most. Weights that leave next to no
    room for a cache, and then caches of 4 bits, are for where there is nothing else.
    """
    counts = question.device_counts
    groups = [counts] if question.num_gpus else [(count,) for count in counts]
    plans = [_plans(question, group) for group in groups]
    precise = [[plan for plan in group if _is_precise(question, plan)] for group in plans]
    roomy = [[plan for plan in group if _has_room(plan)] for group in precise]
    eligible = next((group for group in (*roomy, *precise, *plans) if group), [])
    complete = [plan for plan in eligible if plan.setting.max_seqs >= question.setting.max_seqs]
    return complete[0] if complete else max(eligible, key=lambda plan: plan.setting.max_seqs, default=None)


def _has_room(plan: MemoryPlan) -> bool:
    left = plan.budget - plan.weights
    return plan.weights <= TIGHT_SHARE * plan.budget and (plan.setting.tp == 1 or left >= SPLIT_ROOM)


def _plans(question: Question, counts: tuple[int, ...]) -> list[MemoryPlan]:
    """Those that fit, in the order of preference."""
    ways = [(rank, setting) for tp in counts for rank, setting in enumerate(candidates(question, tp))]
    ways.sort(key=lambda way: (way[0], way[1].tp))
    return [plan for _, setting in ways if (plan := most_seqs(setting)) is not None]


def _is_precise(question: Question, plan: MemoryPlan) -> bool:
    return question.kv_dtype is not None or plan.setting.kv_dtype != FOUR_BIT_CACHE
