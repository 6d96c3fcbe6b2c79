"""Kinds of heads for speculation: what they are for a model, how they start, what they learn, how they are written."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.checkpoint.eagle3_head import write_eagle3
from jaxinfer.checkpoint.eagle_head import write_eagle
from jaxinfer.checkpoint.hf_export import exported_config
from jaxinfer.checkpoint.medusa_heads import write_medusa
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.eagle import eagle_config, init_eagle
from jaxinfer.models.eagle3 import Eagle3Config, eagle3_config, init_eagle3
from jaxinfer.models.medusa import MedusaConfig, init_medusa
from jaxinfer.training.acceptance import MEASURED_GUESSES
from jaxinfer.training.eagle3_loss import Eagle3Loss, tapped_features
from jaxinfer.training.feature_cache import FeatureKind, LastFeatures
from jaxinfer.training.features import CUT, CUT_HEAD
from jaxinfer.training.head_losses import EagleLoss, MedusaLoss
from jaxinfer.training.linear_start import linear_fit
from jaxinfer.training.step import Loss
from jaxinfer.training.student import cut_hf_config
from jaxinfer.training.teacher import Teacher
from jaxinfer.typing import Params

Batches = Iterable[Mapping[str, Any]]
SMALLEST_SCALE = 0.01
"""Of a norm that is divided by."""


class HeadKind(Protocol):
    """A kind of heads: what it is for a model, how it starts and what it learns."""

    def features(self, model: Teacher) -> FeatureKind:
        """What it is given of the model's hidden states."""
        ...

    def check(self, model: Teacher) -> None:
        """Raises ValueError where there are no such heads for this model."""
        ...

    def start(self, model: Teacher, params: Params, seed: int, batches: Batches) -> Params:
        """Float32 parameters before the first step.

        Args:
            model: whose heads they are.
            params: its parameters, and what `cut_output` gives.
            seed: of what is random.
            batches: the data, as losses take it.
        """
        ...

    def loss(self, model: Teacher, frozen: Params) -> Loss:
        """What is minimised. `frozen`: what it will be given."""
        ...

    def measure(self, model: Teacher, frozen: Params) -> Loss:
        """What is measured on held-out text."""
        ...

    def write(self, folder: Path, model: Teacher, frozen: Params, params: Params, dtype: str) -> None:
        """Writes the files that are read as such heads."""
        ...


@dataclass(frozen=True)
class Medusa:
    """Medusa heads.

    Attributes:
        num_heads: how many tokens beyond the next one are guessed.
        num_layers: residual blocks of a head.
        own_heads: each head has an output matrix of its own, which starts as the model's; it takes as much memory as
            the model's, and three times that during training.
        decay: see `MedusaLoss`.

    Raises:
        ValueError: a number is out of range.
    """

    num_heads: int
    num_layers: int = 1
    own_heads: bool = False
    decay: float = 0.8

    def __post_init__(self) -> None:
        MedusaConfig(1, 1, self.num_heads, self.num_layers)
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay={self.decay} must be above 0 and at most 1")

    def config(self, model: Teacher) -> MedusaConfig:
        """Sizes of the heads of this model."""
        sizes = model.config.hidden_size, model.config.vocab_size
        return MedusaConfig(*sizes, self.num_heads, self.num_layers, self.own_heads)

    def features(self, model: Teacher) -> FeatureKind:
        """After the last norm."""
        return LastFeatures()

    def check(self, model: Teacher) -> None:
        """Every model can have them."""

    def start(self, model: Teacher, params: Params, seed: int, batches: Batches) -> Params:
        """Heads that say what the model says of the next token."""
        tied = model.config.tie_word_embeddings
        matrix = params["embed"]["embedding"] if tied else params["lm_head"]["kernel"]
        return init_medusa(self.config(model), matrix if self.own_heads else None)

    def loss(self, model: Teacher, frozen: Params) -> Loss:
        """Medusa-1's."""
        return MedusaLoss(model.config, self.config(model), self.decay, model.dtype)

    def measure(self, model: Teacher, frozen: Params) -> Loss:
        """The same."""
        return self.loss(model, frozen)

    def write(self, folder: Path, model: Teacher, frozen: Params, params: Params, dtype: str) -> None:
        """medusa_lm_head.safetensors and config.json."""
        write_medusa(folder, self.config(model), params, str(model.checkpoint.path), dtype)


def eagle_from_model(fresh: Params, fit: tuple[np.ndarray, np.ndarray], model: Teacher, params: Params) -> Params:
    """An EAGLE head that says what a linear map does, and looks at it with the model's last layer.

    That layer's attention and MLP begin as they are and add nothing yet: their output matrices are zeros. They are
    given features, which the model's last norm has scaled, where the model gives them what its other norms have scaled;
    the quotient of the scales goes into the weights of queries, keys and values and into the norm before the MLP. With
    norms of other kinds they begin with fresh values.

    Args:
        fresh: of `init_eagle`.
        fit: of `linear_fit`.
        model: whose head it is.
        params: its parameters.
    """
    head: dict[str, Any] = dict(fresh)
    own = dict(head["layers_0"])
    if model.config.norm == "rms" and not model.config.norm_unit_offset:
        layer = params[f"layers_{model.config.num_hidden_layers - 1}"]
        own |= {
            name: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), layer[name]) for name in ("attn", "mlp")
        }
        last = jnp.asarray(params["final_norm"]["scale"], jnp.float32)
        last = jnp.where(jnp.abs(last) < SMALLEST_SCALE, SMALLEST_SCALE, last)
        before_attention, before_mlp = (jnp.asarray(layer[f"{name}_norm"]["scale"]) / last for name in ("attn", "mlp"))
        qkv = own["attn"]["qkv"]
        own["attn"] = {**own["attn"], "qkv": {**qkv, "kernel": qkv["kernel"] * before_attention}}
        own["mlp_norm"] = {"scale": before_mlp * jnp.sqrt(jnp.mean(last**2))}  # of features, which it divides by
    for block, name in (("attn", "out"), ("mlp", "down")):
        own[block] = {**own[block], name: jax.tree.map(jnp.zeros_like, own[block][name])}
    kernel, bias = fit
    fc = {"kernel": jnp.asarray(kernel)} | ({"bias": jnp.asarray(bias)} if "bias" in head["fc"] else {})
    return {**head, "fc": fc, "layers_0": own}


@dataclass(frozen=True)
class Eagle:
    """An EAGLE head.

    Attributes:
        use_bias: whether the layer that joins token and feature adds a bias.
        noise, classification_weight, unroll: see `EagleLoss`.
        from_model: start from the best linear guess of the model's features (`linear_fit`) and the model's last layer,
            which adds nothing to it yet, instead of fresh parameters.

    Raises:
        ValueError: a number is out of range.
    """

    use_bias: bool = True
    noise: float = 0.1
    classification_weight: float = 0.1
    unroll: int = 1
    from_model: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.unroll <= MEASURED_GUESSES:
            raise ValueError(f"unroll={self.unroll} must be 1 to {MEASURED_GUESSES}")
        for name in ("noise", "classification_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")

    def features(self, model: Teacher) -> FeatureKind:
        """After the last norm."""
        return LastFeatures()

    def check(self, model: Teacher) -> None:
        """Refuses models whose layers are of another kind, or whose config.json cannot be written."""
        eagle_config(model.config)
        exported_config(self._description(model))

    def start(self, model: Teacher, params: Params, seed: int, batches: Batches) -> Params:
        """Fresh parameters, or those of `eagle_from_model`."""
        config = eagle_config(model.config)
        fresh: Params = jax.jit(lambda key: init_eagle(config, key, use_bias=self.use_bias))(jax.random.key(seed))
        if not self.from_model:
            return fresh
        return eagle_from_model(fresh, linear_fit(model.config, params, batches, self.use_bias), model, params)

    def loss(self, model: Teacher, frozen: Params) -> Loss:
        """Smooth L1 and cross-entropy."""
        return self._loss(model, self.unroll)

    def measure(self, model: Teacher, frozen: Params) -> Loss:
        """The same for drafts of `MEASURED_GUESSES`."""
        return self._loss(model, MEASURED_GUESSES)

    def _loss(self, model: Teacher, unroll: int) -> Loss:
        head = eagle_config(model.config)
        weights = self.classification_weight, self.noise
        return EagleLoss(model.config, head, self.use_bias, *weights, model.dtype, unroll)

    def write(self, folder: Path, model: Teacher, frozen: Params, params: Params, dtype: str) -> None:
        """model.safetensors and config.json."""
        write_eagle(folder, self._description(model), params, np.asarray(frozen["embed"]["embedding"]), dtype)

    def _description(self, model: Teacher) -> Any:
        checkpoint = model.checkpoint
        said = cut_hf_config(checkpoint.hf_config, [0])
        head = eagle_config(model.config)
        return replace(checkpoint, model_config=head, hf_config=said, placements=(), leaves=None, layout=None)


@dataclass(frozen=True)
class TappedFeatures:
    """A `FeatureKind`: hidden states that an EAGLE-3 head is given, and those after the last norm.

    Attributes:
        taps: see `Eagle3Config`.
    """

    taps: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"taps_{'_'.join(map(str, self.taps))}"

    def width(self, model: Teacher) -> int:
        return (len(self.taps) + 1) * model.config.hidden_size

    def of(self, config: ModelConfig, params: Params, ids: jax.Array, segments: jax.Array) -> jax.Array:
        return tapped_features(config, self.taps, params, ids, segments)


@dataclass(frozen=True)
class Eagle3:
    """An EAGLE-3 head. The tokens that the loss compares are those that it guesses among.

    Attributes:
        unroll: see `Eagle3Loss`.
        from_model: start from a copy of the model's layer whose input the head is given last, and of the model's output
            head, instead of fresh parameters.

    Raises:
        ValueError: a number is out of range.
    """

    unroll: int = MEASURED_GUESSES
    from_model: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.unroll <= MEASURED_GUESSES:
            raise ValueError(f"unroll={self.unroll} must be 1 to {MEASURED_GUESSES}")

    def features(self, model: Teacher) -> FeatureKind:
        """Those of the default taps."""
        return TappedFeatures(eagle3_config(model.config).taps)

    def check(self, model: Teacher) -> None:
        """Refuses models whose token table is scaled: published heads are given its rows as they are."""
        if model.config.embedding_multiplier != 1:
            raise ValueError(
                "an EAGLE-3 head is given rows of the token table, which this model scales: train Medusa heads"
            )

    def start(self, model: Teacher, params: Params, seed: int, batches: Batches) -> Params:
        """Fresh parameters, or those of `eagle3_from_layer`."""
        config = self._config(model, params)
        fresh: Params = jax.jit(lambda key: init_eagle3(config, key))(jax.random.key(seed))
        if not self.from_model:
            return fresh
        layer = min(config.taps[-1], model.config.num_hidden_layers - 1)
        head = params[CUT_HEAD] if CUT in params else params
        output = head["embed"]["embedding"] if model.config.tie_word_embeddings else head["lm_head"]["kernel"]
        return eagle3_from_layer(fresh, params[f"layers_{layer}"], params["final_norm"], output)

    def loss(self, model: Teacher, frozen: Params) -> Loss:
        """Cross-entropies of a draft."""
        return Eagle3Loss(model.config, self._config(model, frozen), self.unroll, dtype=model.dtype)

    def measure(self, model: Teacher, frozen: Params) -> Loss:
        """The same for drafts of `MEASURED_GUESSES`."""
        return Eagle3Loss(model.config, self._config(model, frozen), MEASURED_GUESSES, dtype=model.dtype)

    def write(self, folder: Path, model: Teacher, frozen: Params, params: Params, dtype: str) -> None:
        """model.safetensors and config.json."""
        config = self._config(model, frozen)
        tokens = frozen.get(CUT, np.arange(model.config.vocab_size))
        write_eagle3(folder, config, params, np.asarray(tokens), dtype)

    def _config(self, model: Teacher, params: Params) -> Eagle3Config:
        return eagle3_config(model.config, params[CUT].shape[0] if CUT in params else None)


def eagle3_from_layer(fresh: Params, layer: Params, norm: Params, output: jax.Array) -> Params:
    """An EAGLE-3 head that starts as a layer of the model over the last of the hidden states it is given.

    `fc` hands that state on as it is; queries, keys and values begin to learn of the token from their fresh values.

    Args:
        fresh: of `init_eagle3`.
        layer: of the model, in floats, without biases.
        norm: the model's last.
        output: [U, D], the rows of the model's output matrix that it guesses among.
    """
    head: dict[str, Any] = jax.tree.map(jnp.asarray, dict(fresh))
    wide = lambda tree: jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), tree)  # noqa: E731
    own = dict(head["layers_0"])
    qkv = own["attn"]["qkv"]["kernel"]
    size = qkv.shape[-1] // 2
    kernel = qkv.at[..., size:].set(jnp.asarray(layer["attn"]["qkv"]["kernel"], jnp.float32))
    own["attn"] = {"qkv": {"kernel": kernel}, "out": wide(layer["attn"]["out"])}
    own |= {"mlp": wide(layer["mlp"]), "mlp_norm": wide(layer["mlp_norm"]), "feature_norm": wide(layer["attn_norm"])}
    fc = jnp.zeros_like(head["fc"]["kernel"]).at[:, -size:].set(jnp.eye(size))
    started = {"fc": {"kernel": fc}, "layers_0": own, "final_norm": wide(norm)}
    return {**head, **started, "lm_head": {"kernel": jnp.asarray(output, jnp.float32)}}
