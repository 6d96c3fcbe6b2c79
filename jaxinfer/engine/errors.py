"""What callers see when the engine itself cannot serve; EngineDeadError is vLLM's name."""


class EngineDeadError(RuntimeError):
    """A step failed earlier and the KV cache is lost; the engine takes no more work. `__cause__` is the failure."""


class EngineAsleepError(RuntimeError):
    """The engine has given up device memory that it needs for this (`sleep`, `release_kv_cache`); wake it first."""
