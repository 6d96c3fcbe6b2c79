"""Recommendation: what a planner answers, as a dataclass that also reads as a mapping. Never imports JAX."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from jaxinfer.planning.memory_plan import MemoryPlan


@dataclass(frozen=True, eq=False)
class Recommendation(Mapping[str, Any]):
    """How to serve a model on a GPU, or why that cannot be done.

    As a mapping it has the fields, without `plan`; with an `error` only what was asked, the error and the reasons, and
    without one no key "error".

    Attributes:
        gpu: name in `jaxinfer.planning.gpu_specs.GPU_SPECS`.
        model: its name.
        concurrency: requests at the same time that were asked for.
        max_model_len: tokens of the longest request.
        tp: GPUs that the layers are split over, `tensor_parallel_size`.
        quant: format of the weights: "fp16", "fp8", "int8", "awq", ...
        kv_cache_dtype: "auto" (16 bits), "int8", "int4", ...
        max_seqs: requests that run at the same time, `max_num_seqs`; at most `concurrency`.
        max_num_batched_tokens: tokens of a step.
        block_size, num_blocks: of the KV cache, the padding block included.
        kv_tokens: tokens that the KV cache holds.
        memory: bytes on each GPU by part: "weights", "kv_cache", "sampling" (state and logits), "scratch", and their
            sum "total"; "budget" is what may be used, "device" what there is.
        tokens_per_second: of all requests together while they decode, by the card's data sheet: a bound, not a promise.
        engine_arguments: keywords for `LLM`.
        reasons: why, in words.
        error: what cannot be done and what could; None if it can be done.
        plan: the memory plan behind the numbers.
    """

    gpu: str
    model: str
    concurrency: int
    max_model_len: int
    tp: int = 0
    quant: str = ""
    kv_cache_dtype: str = ""
    max_seqs: int = 0
    max_num_batched_tokens: int = 0
    block_size: int = 0
    num_blocks: int = 0
    kv_tokens: int = 0
    memory: Mapping[str, int] | None = None
    tokens_per_second: float = 0.0
    engine_arguments: Mapping[str, Any] | None = None
    reasons: tuple[str, ...] = ()
    error: str | None = None
    plan: MemoryPlan | None = None

    def _keys(self) -> tuple[str, ...]:
        if self.error is not None:
            return ("gpu", "model", "concurrency", "max_model_len", "reasons", "error")
        return tuple(item.name for item in fields(self) if item.name not in ("error", "plan"))

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys():
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())
