"""What callers see when the engine itself fails, under vLLM's name."""


class EngineDeadError(RuntimeError):
    """A step failed earlier and the KV cache is lost; the engine takes no more work. `__cause__` is the failure."""
