"""recommend_config: how to serve a model of some size on some GPUs. Never imports JAX."""

from pathlib import Path

from jaxinfer.config import require_positive
from jaxinfer.models.config import ModelConfig
from jaxinfer.planning.candidates import Question, best_plan, splits
from jaxinfer.planning.engine_support import engine_refusals
from jaxinfer.planning.formulas import kv_format_name, weight_format
from jaxinfer.planning.gpu_names import NamedGPU, find_gpu
from jaxinfer.planning.gpu_specs import FP8_CAPABILITY, GPUSpec
from jaxinfer.planning.memory import require_fraction
from jaxinfer.planning.memory_plan import MemoryPlan, Setting, mean_tokens
from jaxinfer.planning.plan_words import reasons, refusal
from jaxinfer.planning.planned_model import PlannedModel, planned_model
from jaxinfer.planning.recommendation import Recommendation
from jaxinfer.planning.roofline import decode_roofline

DEFAULT_CONTEXT = 4096
DEFAULT_UTILIZATION = 0.92
DEFAULT_BATCHED_TOKENS = 2048


def recommend_config(
    gpu: str,
    model_size: float | str | Path | ModelConfig,
    concurrency: int = 1,
    context: int | None = None,
    *,
    num_gpus: int | None = None,
    tp: int | None = None,
    quant: str | None = None,
    kv_cache_dtype: str | None = None,
    mean_context: int | None = None,
    max_num_batched_tokens: int = DEFAULT_BATCHED_TOKENS,
    block_size: int = 16,
    gpu_memory_utilization: float = DEFAULT_UTILIZATION,
) -> Recommendation:
    """How to serve a model for so many requests at a time.

    Of the ways in which at least one request of the whole context fits, it takes those on the fewest GPUs (where their
    number is given: on any), then the least lossy weights and cache that hold all the requests; if none does, those
    that hold most. Weights that leave next to no room, and then 4-bit caches, are for where nothing else fits. What
    requests need is `jaxinfer.planning.memory_plan.needed_blocks`: one the whole context, many a third on average.

    Args:
        gpu: "A100 80G", "4090 24G", "h200", "2x L40S", ... (A100 40G and 80G, RTX 4090, L4, L40S, H100, H200, B200).
        model_size: billions of parameters (7, "72B"), a model's name, folder, GGUF file or Hub id, or a ModelConfig.
        concurrency: requests at the same time.
        context: tokens of the longest request, prompt and output; None is 4096, or less where the model sees less.
        num_gpus: GPUs there are; also in the name ("4x 4090"). None takes up to eight, as few as will do.
        tp: GPUs to split the layers over, exactly.
        quant: format of the weights ("fp16", "fp8", "int8", "awq", "gptq", "int4", "nf4", "fp4"), None for a choice, or
            for a quantised checkpoint's own.
        kv_cache_dtype: "auto" (16 bits), "int8", "fp8", "fp8_e5m2", "int4"; None for a choice.
        mean_context: tokens that a running request holds on average; None is a third of `context`.
        max_num_batched_tokens: tokens of a step. From a few hundred on products are bound by arithmetic; more than that
            takes memory and gives no speed.
        block_size: tokens of a block of the cache.
        gpu_memory_utilization: share of a GPU's memory that may be used, above 0 and at most 1.

    Returns:
        The recommendation; where nothing fits, with an `error` that says what would.

    Raises:
        ValueError, TypeError: an argument is unknown, out of range, or contradicts another.
        ConnectionError: a Hub id whose config is not here, and the network does not answer.
    """
    sizes = {"concurrency": concurrency, "max_num_batched_tokens": max_num_batched_tokens, "block_size": block_size}
    optional = {"context": context, "num_gpus": num_gpus, "tp": tp, "mean_context": mean_context}
    for name, value in (sizes | {name: value for name, value in optional.items() if value is not None}).items():
        require_positive(name, value)
    found, model = find_gpu(gpu), planned_model(model_size)
    setting = Setting(
        model=model.config,
        gpu=found.spec,
        context=_context(context, model.config),
        max_seqs=concurrency,
        mean_context=mean_context,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        utilization=require_fraction("gpu_memory_utilization", gpu_memory_utilization),
    )
    question = Question(
        gpu=found,
        model=model,
        setting=setting,
        num_gpus=_num_gpus(num_gpus, found, tp),
        tp=_tp(tp, model),
        quant=_quant(quant, model),
        kv_dtype=_kv_dtype(kv_cache_dtype, found.spec),
    )
    plan = best_plan(question)
    return _refused(question) if plan is None else _answer(question, plan)


def _answer(question: Question, plan: MemoryPlan) -> Recommendation:
    setting, step = plan.setting, plan.step
    seqs, tokens = setting.max_seqs, max(setting.max_num_batched_tokens, setting.max_seqs)
    roofline = decode_roofline(
        setting.model, seqs, mean_tokens(setting), plan.weights, setting.tp, kv_dtype=setting.kv_dtype
    )
    arguments = {
        "tensor_parallel_size": setting.tp,
        "quantization": _method(question, setting.quant),
        "kv_cache_dtype": setting.kv_dtype,
        "max_model_len": setting.context,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": tokens,
        "block_size": setting.block_size,
        "gpu_memory_utilization": setting.utilization,
    }
    refused = [f"this version of jaxinfer cannot run it: {reason}" for reason in engine_refusals(arguments)]
    return Recommendation(
        gpu=question.gpu.name,
        model=question.model.name,
        concurrency=question.setting.max_seqs,
        max_model_len=setting.context,
        tp=setting.tp,
        quant=setting.quant,
        kv_cache_dtype=setting.kv_dtype,
        max_seqs=seqs,
        max_num_batched_tokens=tokens,
        block_size=setting.block_size,
        num_blocks=plan.num_blocks,
        kv_tokens=plan.kv_tokens,
        memory={
            "weights": plan.weights,
            "kv_cache": plan.kv_cache,
            "sampling": step.state + step.logits,
            "scratch": step.inputs + step.scratch,
            "total": plan.total,
            "budget": plan.budget,
            "device": setting.gpu.memory_bytes,
        },
        tokens_per_second=seqs / roofline.seconds(setting.gpu),
        engine_arguments=arguments,
        reasons=(*reasons(question, plan, roofline), *refused),
        plan=plan,
    )


def _quant(quant: str | None, model: PlannedModel) -> str | None:
    """What was asked for; None for a choice or the checkpoint's own."""
    if quant is None:
        return None
    if model.method is None:
        return weight_format(quant)[0]
    if quant in model.names:
        return None
    raise ValueError(
        f"quant={quant!r} was asked for, but {model.name} is quantised as {model.packing}, which the engine keeps; "
        "leave that out, or plan for the unquantised checkpoint"
    )


def _method(question: Question, quant: str) -> str | None:
    """The engine's `quantization`."""
    if question.quant is None and question.model.method is not None:
        return question.model.method
    return None if quant in ("fp16", "bf16", "fp32") else quant


def _refused(question: Question) -> Recommendation:
    return Recommendation(
        gpu=question.gpu.name,
        model=question.model.name,
        concurrency=question.setting.max_seqs,
        max_model_len=question.setting.context,
        error=refusal(question),
    )


def _context(context: int | None, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if context is None:
        return min(DEFAULT_CONTEXT, longest)
    if context > longest:
        raise ValueError(f"context={context} exceeds the {longest} positions the model was trained for; lower it")
    return context


def _num_gpus(num_gpus: int | None, gpu: NamedGPU, tp: int | None) -> int | None:
    if num_gpus is not None and gpu.count is not None and num_gpus != gpu.count:
        raise ValueError(f"num_gpus={num_gpus} contradicts the {gpu.count} GPUs in the name; give one of them")
    number = num_gpus or gpu.count
    if number is not None and tp is not None and tp > number:
        raise ValueError(f"tp={tp} is more than the {number} GPUs there are")
    return number


def _tp(tp: int | None, model: PlannedModel) -> int | None:
    if tp is None or splits(model.config, tp):
        return tp
    config = model.config
    raise ValueError(
        f"tp={tp} must divide the {config.num_key_value_heads} KV heads, {config.num_attention_heads} query heads and "
        f"{config.intermediate_size} feed-forward channels of {model.name}"
    )


def _kv_dtype(kv_dtype: str | None, gpu: GPUSpec) -> str | None:
    if kv_dtype is None:
        return None
    name = kv_format_name(kv_dtype)
    if name == "fp8_e4m3" and gpu.compute_capability < FP8_CAPABILITY:
        raise ValueError(
            f"kv_cache_dtype={kv_dtype!r} needs compute capability 8.9, which {gpu.device_name} has not; use 'int8', "
            "which is as small, 'fp8_e5m2' or 'int4'"
        )
    return "auto" if name in ("bfloat16", "float16") else name
