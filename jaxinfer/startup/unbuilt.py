"""vLLM's engine arguments that jaxinfer does not have: refused by name unless they ask for nothing."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unbuilt:
    """An argument that only some values are accepted for.

    Attributes:
        accepted: the values that ask for nothing beyond what happens anyway, vLLM's default first.
        reason: why any other value is refused, and what to do instead.
    """

    accepted: tuple[Any, ...]
    reason: str


_ONE_DEVICE = "an engine runs on one device, or on several with tensor_parallel_size"
_NO_LORA = "LoRA adapters are not built yet; merge the adapter into the weights"
_TEXT_ONLY = "only text models are built"
_NO_GRAMMAR = "structured outputs are not built yet"
_TOKEN_SCALES = "each token and head has a scale of its own, computed as it is written"
_ONE_KV_DTYPE = "all layers' caches have the same dtype"
_NO_OFFLOAD = "offloading to host memory is not built"
_XLA = "jaxinfer compiles with XLA; use enforce_eager=True to skip the warm-up"
_ALWAYS_CHUNKED = "long prompts are always computed in chunks of at most max_num_batched_tokens"
_WINDOWS = "a model always keeps its windows; with a max_model_len of at most the window they hide nothing"
_NO_REMOTE_CODE = "code that comes with a checkpoint is never run"
_MODEL_CONFIG = "pass model_config=ModelConfig(...) with params=... to change the architecture"

UNBUILT: Mapping[str, Unbuilt] = {
    "additional_config": Unbuilt((None, {}), "no plug-in reads it"),
    "allowed_local_media_path": Unbuilt(("", None), _TEXT_ONLY),
    "async_scheduling": Unbuilt((None, True), "the engine always prepares one step ahead of the device"),
    "attention_backend": Unbuilt((None,), "the attention implementation is chosen by the platform"),
    "calculate_kv_scales": Unbuilt((False,), _TOKEN_SCALES),
    "code_revision": Unbuilt((None,), _NO_REMOTE_CODE),
    "compilation_config": Unbuilt((None,), _XLA),
    "config_format": Unbuilt(("auto", "hf"), "the configuration format is told from the files"),
    "convert": Unbuilt(("auto", "none"), "only text generation is built"),
    "cpu_offload_gb": Unbuilt((0,), _NO_OFFLOAD),
    "cudagraph_capture_sizes": Unbuilt((None,), _XLA),
    "device": Unbuilt(("auto",), "JAX's default device is used; choose it with jax.config 'jax_platforms'"),
    "disable_cascade_attn": Unbuilt((False, True), "there is no cascade attention"),
    "disable_custom_all_reduce": Unbuilt((False, True), _ONE_DEVICE),
    "disable_hybrid_kv_cache_manager": Unbuilt((None, False, True), "every layer has the same cache"),
    "disable_log_requests": Unbuilt((True,), "requests are not logged"),
    "disable_sliding_window": Unbuilt((False,), _WINDOWS),
    "distributed_executor_backend": Unbuilt((None, "uni"), _ONE_DEVICE),
    "download_dir": Unbuilt((None,), "Hub models are kept in huggingface_hub's own cache"),
    "enable_chunked_prefill": Unbuilt((True, None), _ALWAYS_CHUNKED),
    "enable_log_requests": Unbuilt((False,), "requests are not logged"),
    "enable_lora": Unbuilt((False, None), _NO_LORA),
    "enable_prompt_embeds": Unbuilt((False,), "prompts are text or token ids"),
    "enable_sleep_mode": Unbuilt((False, True), "every engine can sleep"),
    "fully_sharded_loras": Unbuilt((False,), _NO_LORA),
    "guided_decoding_backend": Unbuilt(("auto", None), _NO_GRAMMAR),
    "hf_config_path": Unbuilt((None,), "config.json is read from the model's own folder"),
    "hf_overrides": Unbuilt((None, {}), _MODEL_CONFIG),
    "io_processor_plugin": Unbuilt((None,), "there are no plug-ins"),
    "kv_cache_dtype_skip_layers": Unbuilt((None, []), _ONE_KV_DTYPE),
    "kv_events_config": Unbuilt((None,), "cache events are not published"),
    "kv_offloading_size": Unbuilt((None,), _NO_OFFLOAD),
    "kv_sharing_fast_prefill": Unbuilt((False,), "layers do not share caches"),
    "kv_transfer_config": Unbuilt((None,), "caches are not moved between engines"),
    "limit_mm_per_prompt": Unbuilt((None, {}), _TEXT_ONLY),
    "load_format": Unbuilt(("auto",), "the weight format is told from the files"),
    "logits_processor_pattern": Unbuilt((None,), "give pure JAX functions as logits_processors"),
    "logprobs_mode": Unbuilt(("raw_logprobs",), "log-probabilities are always those of the raw model logits"),
    "long_prefill_token_threshold": Unbuilt((0,), "the scheduler bounds long prompts by itself"),
    "lora_dtype": Unbuilt(("auto",), _NO_LORA),
    "mamba_cache_dtype": Unbuilt(("auto",), "only attention models are built"),
    "max_cpu_loras": Unbuilt((None,), _NO_LORA),
    "max_long_partial_prefills": Unbuilt((1,), "the scheduler bounds long prompts by itself"),
    "max_lora_rank": Unbuilt((16,), _NO_LORA),
    "max_loras": Unbuilt((1,), _NO_LORA),
    "max_num_partial_prefills": Unbuilt((1,), "the scheduler bounds long prompts by itself"),
    "max_parallel_loading_workers": Unbuilt((None,), "weights are streamed to the device one after the other"),
    "max_seq_len_to_capture": Unbuilt((8192,), _XLA),
    "mm_processor_cache_gb": Unbuilt((4, 0), _TEXT_ONLY),
    "mm_processor_kwargs": Unbuilt((None, {}), _TEXT_ONLY),
    "model_impl": Unbuilt(("auto",), "there is one implementation of each model"),
    "model_loader_extra_config": Unbuilt((None, {}), "the weight format is told from the files"),
    "num_scheduler_steps": Unbuilt((1,), "the engine always prepares one step ahead of the device"),
    "observability_config": Unbuilt((None,), "traces are written by start_profile() only"),
    "optimization_level": Unbuilt((2,), _XLA),
    "otlp_traces_endpoint": Unbuilt((None,), "traces are written by start_profile() only"),
    "override_pooler_config": Unbuilt((None,), "only text generation is built"),
    "pipeline_parallel_size": Unbuilt((1,), _ONE_DEVICE),
    "pooler_config": Unbuilt((None,), "only text generation is built"),
    "prefix_caching_hash_algo": Unbuilt(("sha256", None), "cached blocks are always found by SHA-256"),
    "preemption_mode": Unbuilt((None, "recompute"), "preempted requests are computed again"),
    "prefill_context_parallel_size": Unbuilt((1,), _ONE_DEVICE),
    "decode_context_parallel_size": Unbuilt((1,), _ONE_DEVICE),
    "ray_workers_use_nsight": Unbuilt((False,), _ONE_DEVICE),
    "reasoning_parser": Unbuilt(("", None), "reasoning is not split from the text yet"),
    "rope_scaling": Unbuilt((None, {}), _MODEL_CONFIG),
    "rope_theta": Unbuilt((None,), _MODEL_CONFIG),
    "runner": Unbuilt(("auto", "generate"), "only text generation is built"),
    "scheduler_cls": Unbuilt((None,), "the scheduler cannot be replaced"),
    "served_model_name": Unbuilt((None,), "there is no server here that would show it"),
    "skip_mm_profiling": Unbuilt((False, True), _TEXT_ONLY),
    "stream_interval": Unbuilt((1,), "set SamplingParams(stream_interval=...) for each request"),
    "structured_outputs_config": Unbuilt((None,), _NO_GRAMMAR),
    "swap_space": Unbuilt((4, 0), "preempted requests are computed again, not swapped to host memory"),
    "task": Unbuilt((None, "auto", "generate"), "only text generation is built"),
    "trust_remote_code": Unbuilt((False,), _NO_REMOTE_CODE),
    "worker_cls": Unbuilt(("auto",), "there are no workers"),
    "worker_extension_cls": Unbuilt(("", None), "there are no workers"),
}
"""Argument -> what is accepted for it, and why nothing else is."""


UNBUILT_IN_CALLS: Mapping[str, Unbuilt] = {
    "concurrency_limit": Unbuilt((None,), "max_num_seqs and the KV cache bound what runs at the same time"),
    "data_parallel_rank": Unbuilt((None,), _ONE_DEVICE),
    "lora_request": Unbuilt((None,), _NO_LORA),
    "mm_processor_kwargs": Unbuilt((None, {}), _TEXT_ONLY),
    "tokenization_kwargs": Unbuilt((None, {}), "tokenise the prompt yourself and pass prompt_token_ids"),
    "trace_headers": Unbuilt((None,), "traces are written by start_profile() only"),
}
"""The same for the keywords of generate() and chat()."""


def without_unbuilt(
    arguments: Mapping[str, Any], known: Collection[str] = (), unbuilt: Mapping[str, Unbuilt] = UNBUILT_IN_CALLS
) -> dict[str, Any]:
    """Those of `arguments` that are `known`, after checking that the others ask for nothing.

    Raises:
        ValueError: an argument of vLLM's has a value that needs something not built; its name and the reason.
        TypeError: an argument has an unknown name.
    """
    for name, value in arguments.items():
        if name in known:
            continue
        if name not in unbuilt:
            hint = f"; jaxinfer's are {', '.join(sorted(known))}" if known else ""
            raise TypeError(f"unknown argument {name}={value!r}{hint}")
        refusal = unbuilt[name]
        if value not in refusal.accepted:
            choices = " or ".join(repr(choice) for choice in refusal.accepted)
            raise ValueError(f"{name}={value!r} is not supported: {refusal.reason}. Leave it out (or give {choices}).")
    return {name: value for name, value in arguments.items() if name in known}
