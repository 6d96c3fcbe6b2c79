"""forward_step: the one jitted function of the engine."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.cache.paged import KVCache, LayerCache, write_features
from jaxinfer.cache.spread import channel_spread
from jaxinfer.models.attention import Sight
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import Decoder
from jaxinfer.models.rope import Rotation, rotate
from jaxinfer.runner.eagle_step import EagleStep
from jaxinfer.runner.inputs import StepInput, StepSpec, unpack
from jaxinfer.runner.tree_rows import unpack_tree
from jaxinfer.sampling.batch import NUM_FIELDS, SamplingBatch
from jaxinfer.sampling.draft_rows import DraftRows
from jaxinfer.sampling.logits import LogitsProcessor
from jaxinfer.sampling.sampler import SamplerOutput, sample, sample_greedy
from jaxinfer.sampling.split_logits import gather_logits, sample_greedy_split
from jaxinfer.sampling.state import SamplingState
from jaxinfer.sharding.shards import Shards
from pallas_kernels.kv_write import rope_kv_write
from pallas_kernels.paged_attention import WorkList, make_work_list, paged_attention

GREEDY_FIELDS = ("tokens", "finite")
SAMPLER_FIELDS = ("tokens", "finite", "allowed", "target_logprobs", "target_ranks", "log_normalizers")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["page_ids", "offsets", "block_tables", "query_start", "context_lens", "work_lists", "tree_mask"],
    meta_fields=["num_before"],
)
@dataclass(frozen=True)
class PagedAttention:
    """Attention of one step over the paged pool: rotates, writes the keys and values, attends (an `AttentionFn`).

    `work_lists`: one for each window that layers have, in no order. `tree_mask`: as for `paged_attention`; None without
    trees. `num_before`: each row has so many new tokens before those that are given here, whose keys and values are in
    the pool already; they are new for the sake of the mask.
    """

    page_ids: jax.Array
    offsets: jax.Array
    block_tables: jax.Array
    query_start: jax.Array
    context_lens: jax.Array
    work_lists: tuple[WorkList, ...]
    tree_mask: jax.Array | None = None
    num_before: int = 0

    def __call__(
        self, qkv: jax.Array, angles: Rotation, cache: LayerCache, sight: Sight
    ) -> tuple[jax.Array, LayerCache]:
        """The new tokens' own keys and values are read back from the pages, too: what a token sees does not depend on
        whether it was computed in the same step."""
        q, cache = self.write(qkv, angles, cache)
        if cache.is_spread:
            return self._attend_spread(q, cache, sight).astype(qkv.dtype), cache
        # A float pool of another dtype than the activations is attended to in its own.
        read_dtype = q.dtype if cache.scales is not None else cache.pages.dtype
        return self._attend(q.astype(read_dtype), cache, sight, sight.scale).astype(qkv.dtype), cache

    def write(self, qkv: jax.Array, angles: Rotation, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        """Writes the new keys and values. Returns the queries ``[T, N, H]`` as they are compared with keys in the
        pages, rotated, and spread where these are, and the cache."""
        if not cache.is_spread:
            return self._write(qkv, angles, cache)
        matrix = jnp.asarray(channel_spread(qkv.shape[-1]).matrix, qkv.dtype)
        rotated = jnp.concatenate([rotate(qkv[:, :, :-1], angles), qkv[:, :, -1:]], axis=2)
        half = qkv.shape[0], qkv.shape[-1] // 2
        as_they_are = Rotation(jnp.ones(half), jnp.zeros(half))
        # float32 is multiplied as such; other dtypes are what they are.
        return self._write(jnp.einsum("tkgh,hc->tkgc", rotated, matrix, precision="highest"), as_they_are, cache)

    def _write(self, qkv: jax.Array, angles: Rotation, cache: LayerCache) -> tuple[jax.Array, LayerCache]:
        q, *written = rope_kv_write(
            qkv, angles.cos, angles.sin, cache.pages, self.page_ids, self.offsets, scales=cache.scales
        )
        return q, LayerCache(*written)

    def _attend_spread(self, q: jax.Array, cache: LayerCache, sight: Sight) -> jax.Array:
        """Where the channels of queries, keys and values are spread in the pages; what comes out is not."""
        head_dim = q.shape[-1]
        spread = channel_spread(head_dim)
        scale = head_dim**-0.5 if sight.scale is None else sight.scale
        out = self._attend(q, cache, sight, scale / spread.gain)
        matrix = jnp.asarray(spread.matrix, q.dtype) / jnp.asarray(spread.gain, q.dtype)
        return jnp.einsum("tnc,hc->tnh", out, matrix, precision="highest")

    def _attend(self, q: jax.Array, cache: LayerCache, sight: Sight, scale: float | None) -> jax.Array:
        shape = q.shape
        if self.num_before:
            each = q.reshape(self.context_lens.shape[0], -1, *shape[1:])
            q = jnp.pad(each, ((0, 0), (self.num_before, 0), (0, 0), (0, 0))).reshape(-1, *shape[1:])
        out = paged_attention(
            q,
            cache.pages,
            self.block_tables,
            self.query_start,
            self.context_lens,
            scales=cache.scales,
            scale=scale,
            window=sight.window,
            softcap=sight.softcap,
            tree_mask=self.tree_mask,
            work_list=next(work_list for work_list in self.work_lists if work_list.window == sight.window),
        )
        if self.num_before:
            out = out.reshape(self.context_lens.shape[0], -1, *shape[1:])[:, self.num_before :].reshape(shape)
        return out


class StepOutput(NamedTuple):
    """What a step leaves behind.

    Attributes:
        packed: int32[fields, R], all that the host reads, floats as their bits: `GREEDY_FIELDS`, or `SAMPLER_FIELDS`
            followed by k best ids and their k log-probabilities.
        logits: float32[R, V], left on the device for requests that want every log-probability; None without sampler.
        kv: the pool.
        state: what the device remembers of each slot.
    """

    packed: jax.Array
    logits: jax.Array | None
    kv: KVCache
    state: SamplingState


def make_forward_step(
    config: ModelConfig,
    params_tree: Any,
    spec: StepSpec,
    *,
    block_size: int,
    num_logprobs: int,
    processors: tuple[LogitsProcessor, ...] = (),
    shards: Shards | None = None,
    eagle: EagleStep | None = None,
) -> Callable[..., StepOutput]:
    """The step function of one spec: ``(leaves, kv, state, packed) -> StepOutput``, jitted with kv and state donated.
    Where the sampler decides about drafts that were drawn, `DraftRows.drafted` comes next, and with an EAGLE head the
    leaves of its parameters last.

    Parameters come as a flat tuple of leaves, since dispatch costs grow with the nesting of the arguments;
    `params_tree` is their tree structure.

    Args:
        config: the architecture.
        params_tree: treedef of the parameters.
        spec: shapes and mode.
        block_size: S.
        num_logprobs: k, alternatives a row brings back (sampler only).
        processors: custom logits processors, applied in order (sampler only).
        shards: how the model is split, where it is; then the function is one for `Placement.program`, `params_tree` is
            of one device's part (`Shards.part_shapes`), and state and packed are whole on every device.
        eagle: the head whose layer the step keeps up with its tokens; None for none.
    """
    sum_over = None if shards is None else shards.sum_over
    part, splits_experts = (config, False) if shards is None else (shards.split.part, shards.split.splits_experts)
    decoder = Decoder(part, sum_over=sum_over, splits_experts=splits_experts)
    taps = () if eagle is None else eagle.model.taps

    def forward_step(
        leaves: tuple[jax.Array, ...],
        kv: KVCache,
        state: SamplingState,
        packed: jax.Array,
        drafted: jax.Array | None = None,
        head: tuple[jax.Array, ...] = (),
    ) -> StepOutput:
        variables = {"params": jax.tree.unflatten(params_tree, leaves)}
        step = unpack(packed, spec)
        tokens = jnp.where(step.token_slots < 0, step.tokens, state.last_tokens[jnp.maximum(step.token_slots, 0)])
        attention = make_attention(step, spec, part, block_size)
        run: Any = decoder.apply
        layers, own = kv.layers[: config.num_hidden_layers], kv.layers[config.num_hidden_layers :]
        given = tokens, step.positions, attention, layers, taps
        hidden, written, tapped = run(variables, *given, method=Decoder.tapped)
        kv = kv._replace(layers=(*written, *own))
        if eagle is None:
            kv = write_features(kv, attention.page_ids, attention.offsets, hidden)
        else:
            kv = eagle(head, variables["params"], step._replace(tokens=tokens), attention, (hidden, tapped), kv)
        logits = run(variables, hidden[step.logits_tokens], method=Decoder.logits)
        if not spec.sampler:
            drawn, finite = (
                sample_greedy(logits) if sum_over is None else sample_greedy_split(logits, sum_over, config.vocab_size)
            )
            last_tokens = state.last_tokens.at[step.sampling[0]].set(drawn, mode="drop")
            results = jnp.stack([drawn, finite.astype(jnp.int32)])
            return StepOutput(results, None, kv, state._replace(last_tokens=last_tokens))
        if sum_over is not None:
            logits = gather_logits(logits, sum_over, config.vocab_size)
        batch = SamplingBatch.unpack(step.sampling[:NUM_FIELDS])
        drafts = None
        if spec.num_drafts:
            packed_drafts = step.sampling[NUM_FIELDS:]
            drafts = DraftRows.unpack(packed_drafts, spec.num_drafts, drafted, spec.typical is not None)
        output, state = sample(
            logits,
            batch,
            state,
            processors=processors,
            num_logprobs=num_logprobs,
            drafts=drafts,
            typical=spec.typical if spec.tree_width else None,
        )
        return StepOutput(pack_output(output), logits, kv, state)

    return forward_step


def make_attention(step: StepInput, spec: StepSpec, config: ModelConfig, block_size: int) -> PagedAttention:
    """What all layers of a step share in their attention."""
    return attention_over(
        config,
        page_ids=step.page_ids,
        offsets=step.offsets if spec.tree_width else step.positions % block_size,
        tree_mask=unpack_tree(step.tree, spec.tree_width) if step.tree is not None and spec.tree_width else None,
        block_tables=step.block_tables,
        query_start=step.query_start,
        context_lens=step.context_lens,
        num_tokens=spec.num_tokens,
    )


def attention_over(
    config: ModelConfig,
    *,
    query_start: jax.Array,
    context_lens: jax.Array,
    num_tokens: int,
    whole: bool = False,
    **fields: Any,
) -> PagedAttention:
    """The attention of T new tokens in a model's layers.

    Args:
        config: of the model.
        query_start, context_lens: as for `paged_attention`.
        num_tokens: T.
        whole: as for `make_work_list`.
        fields: the other arguments of `PagedAttention`, but the work lists.
    """
    work_lists = tuple(
        make_work_list(
            query_start,
            context_lens,
            num_tokens=num_tokens,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            window=window,
            whole=whole,
        )
        for window in config.windows
    )
    return PagedAttention(query_start=query_start, context_lens=context_lens, work_lists=work_lists, **fields)


def pack_output(output: SamplerOutput) -> jax.Array:
    """The sampler's output as one int32 matrix, a row a field, so that it crosses to the host in one copy."""
    logprobs = output.logprobs
    as_bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    rows = [
        output.tokens,
        output.finite.astype(jnp.int32),
        output.allowed.astype(jnp.int32),
        as_bits(logprobs.target_logprobs),
        logprobs.target_ranks,
        as_bits(logprobs.log_normalizers),
    ]
    return jnp.concatenate([jnp.stack(rows), logprobs.top_ids.T, as_bits(logprobs.top_logprobs).T])
