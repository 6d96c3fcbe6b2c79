"""What callers see when the engine itself cannot serve; EngineDeadError is vLLM's name."""

ASLEEP = (
    "the engine has given up device memory and computes nothing: call wake_up(), or restore_kv_cache() after "
    "release_kv_cache()"
)
"""What an EngineAsleepError says."""


class EngineDeadError(RuntimeError):
    """A step failed earlier and the KV cache is lost; the engine takes no more work. `__cause__` is the failure."""


class EngineAsleepError(RuntimeError):
    """The engine has given up device memory that it needs for this (`sleep`, `release_kv_cache`); wake it first."""


def describe_failure(failure: BaseException) -> str:
    """The kind of an exception and its text, with what to do where memory ran out."""
    text = f"{type(failure).__name__}: {failure}".rstrip(": ")
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        text += "; the device ran out of memory: lower gpu_memory_utilization, max_num_batched_tokens or max_num_seqs"
    return text
