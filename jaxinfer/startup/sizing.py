"""How large an engine is: what runs at once, how long requests may be, how many KV blocks there are."""

import logging
from collections.abc import Iterable
from dataclasses import replace

import jax

from jaxinfer.cache_dir import default_cache_dir
from jaxinfer.config import CacheConfig, EngineConfig, RunnerConfig, SchedulerConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.planning.memory import (
    DeviceBudget,
    cpu_num_kv_blocks,
    held_tokens,
    kv_block_bytes,
    num_kv_blocks,
    num_kv_blocks_in,
    num_kv_blocks_override,
)
from jaxinfer.planning.step_memory import step_memory
from jaxinfer.quant.gpu_matmul import rounds_activations
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.runner.buckets import tiled_buckets, token_buckets
from jaxinfer.runner.fixed_tiles import tile_tokens
from jaxinfer.runner.kv_support import require_kv_dtype, slow_pool
from jaxinfer.sharding.placement import Placement
from jaxinfer.sharding.shards import Shards, shards_of
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.device_memory import DeviceMemory, device_memory
from jaxinfer.startup.guesser import Guesser
from jaxinfer.startup.processes import agreed_minimum
from jaxinfer.startup.speculation import speculation_config
from jaxinfer.typing import Params

logger = logging.getLogger("jaxinfer")

CPU_CONCURRENCY = (32, 512)
GPU_CONCURRENCY = (256, 8192)
LARGE_GPU_CONCURRENCY = (1024, 16384)
"""Defaults of (max_num_seqs, max_num_batched_tokens). On the CPU more rows gain nothing and every step size costs
about a second to compile."""
LARGE_GPU_BYTES = 70 * 2**30


def engine_config(
    args: EngineArgs,
    model: ModelConfig,
    dtype: str,
    loaded: Params | None,
    plan: QuantPlan | None = None,
    guesser: Guesser | None = None,
    shards: Shards | None = None,
) -> EngineConfig:
    """The complete configuration.

    Args:
        args: checked settings; those left open are chosen here.
        model: the architecture.
        dtype: dtype name of parameters and activations.
        loaded: live parameters that are in the devices' memory already, arranged; None when they will be loaded.
        plan: which of the parameters that will be loaded are quantised, and how; None for none.
        guesser: what speculation is to load as well; None for nothing.
        shards: how the model lies on several devices, of which each has the same; None is on one.

    Raises:
        ValueError: a request of `max_model_len` tokens cannot fit, sizes contradict each other, or the device cannot
            do the cache's dtype.
    """
    platform = jax.default_backend()
    shards = shards or shards_of(model, Placement())
    num_devices = args.data_parallel_size * shards.placement.num_devices
    memory = device_memory(platform, args.gpu_memory_utilization, num_devices)
    max_model_len = _max_model_len(args, model)
    if model.rope_scaling is not None and model.rope_scaling.depends_on_length and not model.rope_length:
        model = replace(model, rope_length=max_model_len)
    max_num_seqs, max_num_batched_tokens = _concurrency(args, platform, memory)
    speculation = speculation_config(args.speculative_options, guesser, platform)
    guesses = 0 if speculation is None else speculation.num_tokens * min(speculation.max_running, max_num_seqs)
    tile = tile_tokens(platform) if args.deterministic else 0
    scheduler = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        policy="priority" if args.scheduling_policy == "priority" else "fcfs",
        token_buckets=tiled_buckets(max_num_seqs, max_num_batched_tokens, tile)
        if tile
        else token_buckets(max_num_seqs, max_num_batched_tokens, guesses and guesses + max_num_seqs),
    )
    arranged = shards.arranged(param_shapes(model, jax.numpy.dtype(dtype), plan)) if loaded is None else loaded
    shapes = shards.part_shapes(arranged)
    weights = tree_bytes(jax.tree.leaves(shapes))
    free = memory.free + (weights if loaded is not None else 0)
    kv_dtype = dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    require_kv_dtype(kv_dtype)
    features = None if speculation is None else speculation.feature_spec(model, dtype)
    block_bytes = kv_block_bytes(shards.split.part, args.block_size, kv_dtype, features)
    drafted = 0
    if guesser is not None and speculation is not None:
        weights += guesser.weight_bytes(dtype)
        block_bytes += guesser.block_bytes(args.block_size, kv_dtype)
        running = min(speculation.max_running, max_num_seqs)
        drafted = guesser.step_bytes(model.vocab_size, running, speculation.num_tokens)
    budget = DeviceBudget(
        total_bytes=memory.total,
        free_bytes=min(free, memory.total),
        weight_bytes=weights,
        activation_bytes=drafted
        + activation_bytes(
            model,
            scheduler,
            dtype,
            args.block_size,
            rounds_activations(shapes),
            guesses,
            shards.split.num_parts,
        ),
        utilization=args.gpu_memory_utilization,
    )
    held = held_tokens(model, args.block_size, max_model_len, max_num_batched_tokens)
    num_blocks = _num_blocks(args, block_bytes, held, scheduler, budget, platform)
    num_blocks = agreed_minimum(shards.placement, num_blocks)
    config = EngineConfig(
        model=model,
        cache=CacheConfig(args.block_size, num_blocks, kv_dtype, args.enable_prefix_caching),
        scheduler=scheduler,
        runner=RunnerConfig(
            dtype=dtype,
            max_logprobs=args.max_logprobs,
            enforce_eager=args.enforce_eager,
            compilation_cache_dir=compilation_cache_dir(args),
            logits_processors=args.logits_processors,
            tile=tile,
        ),
        seed=args.seed,
        speculation=speculation,
    )
    reason = slow_pool(replace(config, model=shards.split.part))
    if reason is not None:
        logger.warning("the KV cache is written by XLA, in some launches a layer more than by the kernel: %s", reason)
    return config


def tree_bytes(leaves: Iterable[jax.ShapeDtypeStruct]) -> int:
    """Bytes of arrays of these shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def activation_bytes(
    model: ModelConfig,
    scheduler: SchedulerConfig,
    dtype: str,
    block_size: int = 16,
    rounds: bool = False,
    num_drafted: int = 0,
    num_parts: int = 1,
) -> int:
    """What the largest step holds beside weights and cache, in bytes, the sampler's state included.

    `rounds`: whether activations are rounded to 8 bits; `num_drafted`: logits rows beyond one for each request;
    `num_parts`: devices that the model is split over.
    """
    return step_memory(
        model,
        num_tokens=scheduler.max_num_batched_tokens,
        num_rows=scheduler.max_num_seqs + num_drafted,
        table_width=-(-scheduler.max_model_len // block_size),
        itemsize=jax.numpy.dtype(dtype).itemsize,
        rounds=rounds,
        tp=num_parts,
    ).total


def _max_model_len(args: EngineArgs, model: ModelConfig) -> int:
    longest = model.max_position_embeddings
    if args.max_model_len is None:
        return longest
    if args.max_model_len > longest:
        raise ValueError(
            f"max_model_len={args.max_model_len} exceeds the {longest} positions the model was trained for; lower it"
        )
    return args.max_model_len


def _concurrency(args: EngineArgs, platform: str, memory: DeviceMemory) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens: as given, else the device's defaults, else what fits what is given."""
    seqs, tokens = GPU_CONCURRENCY
    if platform == "cpu":
        seqs, tokens = CPU_CONCURRENCY
    elif memory.total >= LARGE_GPU_BYTES:
        seqs, tokens = LARGE_GPU_CONCURRENCY
    if args.max_num_seqs is not None:
        tokens = max(tokens, args.max_num_seqs)
    if args.max_num_batched_tokens is not None:
        tokens = args.max_num_batched_tokens
    return args.max_num_seqs or min(seqs, tokens), tokens


def _num_blocks(
    args: EngineArgs, block_bytes: int, held: int, scheduler: SchedulerConfig, budget: DeviceBudget, platform: str
) -> int:
    """Blocks of the pool; a request of `max_model_len` tokens takes `held` slots at the same time."""
    if args.num_gpu_blocks_override is not None:
        return num_kv_blocks_override(args.num_gpu_blocks_override)
    sizes = {
        "block_bytes": block_bytes,
        "block_size": args.block_size,
        "max_model_len": scheduler.max_model_len,
        "held": held,
    }
    if args.kv_cache_memory_bytes is not None:
        return num_kv_blocks_in(args.kv_cache_memory_bytes, **sizes)
    if not budget.total_bytes:
        raise ValueError(
            f"gpu_memory_utilization={args.gpu_memory_utilization} is a share of the device's memory, whose size "
            "JAX does not tell here; give kv_cache_memory_bytes or num_gpu_blocks_override"
        )
    if platform == "cpu":
        return cpu_num_kv_blocks(budget, **sizes, max_num_seqs=scheduler.max_num_seqs)
    return num_kv_blocks(budget, **sizes)


def compilation_cache_dir(args: EngineArgs) -> str | None:
    """Where compiled programs are kept; None keeps none."""
    if args.compilation_cache_dir is False:
        return None
    return str(args.compilation_cache_dir or default_cache_dir() / "programs")
