"""The engine's settings: small frozen dataclasses, validated where they are made."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxinfer.models.config import ModelConfig

SchedulingPolicy = Literal["fcfs", "priority"]
FeatureKind = Literal["hidden", "eagle"]

KV_CACHE_DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8_e4m3", "fp8_e5m2", "int4")
"""What keys and values can be stored as. The last four are codes with a float32 scale per token and head."""


def require_positive(name: str, value: object) -> None:
    """Raises unless `value` is an int of at least 1 (bools are refused)."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an int")
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


@dataclass(frozen=True)
class CacheConfig:
    """The KV pool.

    Args:
        block_size: tokens in a block (page), S.
        num_blocks: blocks in the pool, the padding sink (block 0) included; so `num_blocks - 1` can be allocated.
        dtype: of the keys and values, one of `KV_CACHE_DTYPES`, or "auto" for that of the activations.
        enable_prefix_caching: requests find full blocks that others, or they themselves, have computed before.
    """

    block_size: int = 16
    num_blocks: int = 1024
    dtype: str = "auto"
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        require_positive("block_size", self.block_size)
        require_positive("num_blocks", self.num_blocks)
        if self.num_blocks < 2:
            raise ValueError(f"num_blocks={self.num_blocks} leaves nothing beside the padding block; give at least 2")
        if self.dtype not in ("auto", *KV_CACHE_DTYPES):
            raise ValueError(f"cache dtype={self.dtype!r} must be 'auto' or one of {', '.join(KV_CACHE_DTYPES)}")


@dataclass(frozen=True)
class SchedulerConfig:
    """How much runs at once.

    Args:
        max_num_seqs: requests that may run at the same time, C.
        max_num_batched_tokens: token budget of one step.
        max_model_len: longest prompt plus output, in tokens.
        policy: "fcfs", or "priority" (a lower value runs first, ties by arrival).
        token_buckets: the step sizes that are compiled, ascending, the last at least `max_num_batched_tokens`; empty
            when any size is as good as another (a stubbed device).
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    policy: SchedulingPolicy = "fcfs"
    token_buckets: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            require_positive(name, getattr(self, name))
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_seqs={self.max_num_seqs} exceeds max_num_batched_tokens={self.max_num_batched_tokens}: "
                "a step could not give every running request a token; lower the one or raise the other"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ValueError(f"policy={self.policy!r} must be 'fcfs' or 'priority'")
        buckets = self.token_buckets
        if list(buckets) != sorted(set(buckets)):
            raise ValueError(f"token_buckets={buckets} must ascend without repeats")
        if buckets and buckets[-1] < self.max_num_batched_tokens:
            raise ValueError(
                f"token_buckets ends at {buckets[-1]}, below max_num_batched_tokens={self.max_num_batched_tokens}"
            )


@dataclass(frozen=True)
class RunnerConfig:
    """How steps run on the device.

    Args:
        dtype: dtype name of parameters and activations: "float32", "bfloat16" or "float16".
        max_logprobs: most alternatives per token that `logprobs` may ask for; -1 lifts the limit.
        enforce_eager: skip warm-up; programs compile when first needed.
        compilation_cache_dir: folder of the persistent compile cache, or None to leave JAX's setting alone.
        logits_processors: pure JAX functions `(logits[R, V], LogitsContext) -> logits[R, V]`, applied in order.
        tile: in the deterministic mode, how many tokens are computed at a time; 0 for all of a step.
    """

    dtype: str = "float32"
    max_logprobs: int = 20
    enforce_eager: bool = False
    compilation_cache_dir: str | None = None
    logits_processors: tuple[Callable[..., Any], ...] = ()
    tile: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype={self.dtype!r} must be 'float32', 'bfloat16' or 'float16'")
        if self.max_logprobs < -1:
            raise ValueError(f"max_logprobs={self.max_logprobs} must be -1 (no limit) or at least 0")


@dataclass(frozen=True)
class FeatureSpec:
    """What a step leaves in the pool for each of its tokens beside keys and values, for a method that guesses from it.

    Args:
        kind: "hidden" for the hidden state after the last norm, "eagle" for what an EAGLE head is given.
        width: numbers of each token, D.
        dtype: dtype name of the activations.
        layer: a layer of the method's own, whose keys and values lie behind those of the model's layers.
        spare_blocks: blocks that this layer has beyond the pool's, which belong to no request.
    """

    kind: FeatureKind
    width: int
    dtype: str
    layer: ModelConfig | None = None
    spare_blocks: int = 0

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a block of `block_size` tokens, without the layer's."""
        return block_size * self.width * (4 if self.dtype == "float32" else 2)


@dataclass(frozen=True)
class EagleTree:
    """How far an EAGLE head guesses, and how much of that is kept (arXiv:2406.16858).

    Args:
        layer: architecture of the head's layer.
        depth: tokens ahead.
        top_k: nodes of each depth that go on growing, and children that each of them is given. 1 makes a chain.
        num_nodes: of all nodes, the best by the product of the head's probabilities on the way to them; their parents
            are among them, since these are at least as good.
    """

    layer: ModelConfig
    depth: int
    top_k: int
    num_nodes: int

    def __post_init__(self) -> None:
        for name in ("depth", "top_k", "num_nodes"):
            require_positive(name, getattr(self, name))

    @property
    def num_candidates(self) -> int:
        """Nodes that are looked at."""
        return self.top_k + (self.depth - 1) * self.top_k**2

    @property
    def num_kept(self) -> int:
        """Nodes of a draft."""
        return min(self.num_nodes, self.num_candidates)

    def spare_blocks(self, block_size: int) -> int:
        """Blocks that a tree grows in beyond that of its root."""
        return -(-self.top_k * (self.depth - 1) // block_size)


@dataclass(frozen=True)
class TypicalAcceptance:
    """LOSSY: random requests keep guesses that are typical of the model's distribution, although it drew other tokens
    (arXiv:2401.10774, section 2.3.2): those with a probability above ``min(threshold, alpha * exp(-entropy))``.

    Args:
        posterior_threshold: above 0 and below 1.
        posterior_alpha: above 0.
    """

    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3

    def __post_init__(self) -> None:
        for name, limit in (("posterior_threshold", 1.0), ("posterior_alpha", float("inf"))):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise TypeError(f"{name}={value!r} must be a number")
            if not 0 < value < limit:
                raise ValueError(f"{name}={value} must be above 0" + (" and below 1" if limit == 1 else ""))


@dataclass(frozen=True)
class SpeculationConfig:
    """How far ahead the engine guesses, and when it does.

    Args:
        num_tokens: k, drafts a request is given in a step at most.
        is_adaptive: each request gets as many of them as its measured acceptance makes worth while.
        max_running: the engine guesses while at most this many requests run. With more the device is busy enough with
            one token for each, and verifying would take longer than what it saves.
        keeps_probabilities: the method draws its drafts, and keeps the distributions it drew them from for the
            verification; False where drafts are certain (taken from the text, or a draft model's best).
        features: what the method guesses from, kept in the pool (`FeatureSpec`); None for tokens alone.
        tree_depth: drafts may be trees whose deepest token is at most so far behind the last known one; 0 for chains
            of `num_tokens`. A tree's tokens are certain.
        eagle: of "eagle" features, the head that is given them.
        typical: a lossy rule by which trees are accepted; None accepts what plain decoding draws.
    """

    num_tokens: int
    is_adaptive: bool = False
    max_running: int = 8
    keeps_probabilities: bool = False
    features: FeatureKind | None = None
    tree_depth: int = 0
    eagle: EagleTree | None = None
    typical: TypicalAcceptance | None = None

    def __post_init__(self) -> None:
        require_positive("num_speculative_tokens", self.num_tokens)
        if not 0 <= self.tree_depth <= self.num_tokens:
            raise ValueError(f"tree_depth={self.tree_depth} must be 0 to num_speculative_tokens={self.num_tokens}")
        if self.tree_depth and self.keeps_probabilities:
            raise ValueError("keeps_probabilities=True is for chains; leave it out where drafts are trees")
        if self.typical is not None and not self.tree_depth:
            raise ValueError("typical acceptance is for trees of certain guesses; leave it out")
        require_positive("disable_by_batch_size", self.max_running)

    def feature_spec(self, model: ModelConfig, dtype: str) -> FeatureSpec | None:
        """The pool's features for a model whose activations are of `dtype`; None for none."""
        if self.features is None:
            return None
        layer = None if self.eagle is None else self.eagle.layer
        return FeatureSpec(self.features, (layer or model).hidden_size, dtype, layer)

    @property
    def depth(self) -> int:
        """Tokens of a draft that follow one another, at most."""
        return self.tree_depth or self.num_tokens


@dataclass(frozen=True)
class EngineConfig:
    """Everything an Engine and its Runner are built from; `speculation` is None where every step is of known tokens."""

    model: ModelConfig
    cache: CacheConfig
    scheduler: SchedulerConfig
    runner: RunnerConfig
    seed: int = 0
    speculation: SpeculationConfig | None = None

    @property
    def max_draft_rows(self) -> int:
        """Drafts of one step, at most: as many logits rows more than one for each running request."""
        speculation = self.speculation
        if speculation is None:
            return 0
        return speculation.num_tokens * min(speculation.max_running, self.scheduler.max_num_seqs)

    @property
    def kv_dtype(self) -> str:
        """What keys and values are stored as, one of `KV_CACHE_DTYPES`."""
        return self.runner.dtype if self.cache.dtype == "auto" else self.cache.dtype

    @property
    def features(self) -> FeatureSpec | None:
        """What the pool keeps of each token beside keys and values; None for nothing."""
        speculation = self.speculation
        spec = None if speculation is None else speculation.feature_spec(self.model, self.runner.dtype)
        if spec is None or speculation is None or speculation.eagle is None:
            return spec
        lanes = min(speculation.max_running, self.scheduler.max_num_seqs)
        return replace(spec, spare_blocks=lanes * speculation.eagle.spare_blocks(self.cache.block_size))
