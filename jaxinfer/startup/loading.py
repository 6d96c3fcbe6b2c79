"""From EngineArgs to a running engine: model, tokenizer, parameters, pool, runner."""

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from jaxinfer.cache_dir import default_cache_dir
from jaxinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.load import load_params, resolve_dtype
from jaxinfer.checkpoint.resolve import resolve_model
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.engine.replicas import AnyEngine
from jaxinfer.engine.sampling_params import SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.quant.summary import format_lines, summarise_plan
from jaxinfer.runner.compile_cache import enable_compile_cache
from jaxinfer.runner.runner import ModelRunner
from jaxinfer.sharding.placement import Placement
from jaxinfer.sharding.shards import Shards, shards_of
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.device_memory import claim_gpu_memory
from jaxinfer.startup.devices import mesh_placement, placements
from jaxinfer.startup.generation_config import end_ids, read_generation_config, sampling_defaults
from jaxinfer.startup.guesser import Guesser
from jaxinfer.startup.live_params import dtype_of_params, match_params
from jaxinfer.startup.processes import check_same
from jaxinfer.startup.quantization import named_method, quant_plan
from jaxinfer.startup.replica import AnySleep, Replica, serving_together
from jaxinfer.startup.resting_weights import RestingWeights
from jaxinfer.startup.sizing import engine_config
from jaxinfer.startup.sleep import Sleep
from jaxinfer.startup.speculation import make_speculation, open_guesser
from jaxinfer.tokenizers.load import load_tokenizer
from jaxinfer.tokenizers.tokenizer import Tokenizer
from jaxinfer.typing import Params

logger = logging.getLogger("jaxinfer")


class EngineParts:
    """What a front door owns.

    Args:
        replicas: engines of the same settings, one or more.
        tokenizer: None when only token ids are served.
        defaults: fields of SamplingParams that the model's generation config sets.
        plan: which parameters are quantised, and how; None for none.
        shapes: the parameters' shapes in floats.
        shards: how the parameters that are given lie on the devices, those of the first replica.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        tokenizer: Tokenizer | None,
        defaults: Mapping[str, Any],
        plan: QuantPlan | None,
        shapes: Params,
        shards: Shards,
    ) -> None:
        self._replicas = replicas
        self._engine: AnyEngine | None
        self._engine, self._sleep = serving_together(replicas)
        self._plan = plan
        self._shapes = shapes
        self._shards = shards
        self.defaults = defaults
        self.tokenizer = tokenizer

    @property
    def engine(self) -> AnyEngine:
        """Raises EngineDeadError after `close`."""
        if self._engine is None:
            raise EngineDeadError("the engine has been shut down; make a new one")
        return self._engine

    def default_sampling_params(self) -> SamplingParams:
        """What requests get that bring no parameters."""
        return SamplingParams(**self.defaults)

    @property
    def sleep(self) -> AnySleep:
        """The engine's device memory, given up and taken back. Raises EngineDeadError after `close`."""
        self.engine.check_alive()
        return self._sleep

    @property
    def spans_processes(self) -> bool:
        """Other processes run this engine as well; see `check_same_calls`."""
        return self._shards.placement.spans_processes

    def check_same_calls(self, what: str, *parts: object) -> None:
        """Raises ValueError, in all processes that run this engine, where they do not ask the same of it."""
        check_same(self._shards.placement, what, parts)

    def update_params(self, params: Params, aborts: bool = False) -> list[RequestOutput]:
        """Checks new parameters, quantises them as the old ones were, and swaps them; to be called between two steps.
        Keys and values of the old ones are never found again.

        Args:
            params: see `LLM.update_params`.
            aborts: whether running requests end; returns their last outputs.
        """
        engine, config = self.engine, self.engine.config
        checked = match_params(params, config.model, config.runner.dtype, self._plan, self._shapes, self._shards)
        outputs = engine.abort_all() if aborts else []
        self._sleep.update_params(checked)
        engine.params_changed()
        return outputs

    def close(self) -> None:
        """Frees the device memory that is the engine's own. Idempotent."""
        if self._engine is not None:
            self._engine = None
            for replica in self._replicas:
                replica.close()
            self._replicas = ()


def load_engine(args: EngineArgs, model_config: ModelConfig | None, params: Params | None) -> EngineParts:
    """Makes an engine, warmed up unless `args.enforce_eager`.

    Args:
        args: checked settings.
        model_config: architecture of `params`; None where `args.model` says it.
        params: live parameters; None reads the checkpoint's.

    Raises:
        ValueError: something does not fit, by name.
        ConnectionError: the model has to be downloaded and the network does not answer.
    """
    _check_source(args, model_config, params)
    claim_gpu_memory(args.gpu_memory_utilization)
    if args.mesh is None:
        where = placements(args.data_parallel_size, args.tensor_parallel_size)
    else:
        where = [mesh_placement(args.mesh, args.axis_names, args.tensor_parallel_size)]
    checkpoint = None if args.model is None else open_checkpoint(find_model(args, args.model, args.revision))
    model = model_config or (checkpoint.model_config if checkpoint else None)
    assert model is not None
    generation = read_generation_config(args.generation_config, checkpoint.generation_config if checkpoint else {})
    generation = {**generation, **(args.override_generation_config or {})}
    defaults = sampling_defaults(generation)
    tokenizer = make_tokenizer(args, checkpoint)
    ends = _end_ids(checkpoint, tokenizer) | end_ids(generation)
    plan = quant_plan(
        named_method(args.quantization),
        args.quant_options,
        model,
        checkpoint if params is None else None,
        jax.default_backend(),
        where[0].num_parts,
    )
    options = args.speculative_options
    guesser = open_guesser(args, options, model, checkpoint, tokenizer, where[0].num_parts)
    config, weights, shapes, shards = _config_and_params(args, model, checkpoint, params, plan, guesser, where[0])
    check_same(where[0], "settings", _settings(config))
    if plan is not None:
        facts = summarise_plan(plan, shapes)
        logger.info("weights as %s: %s", plan.method, format_lines(facts))
    if config.runner.compilation_cache_dir is not None:
        enable_compile_cache(config.runner.compilation_cache_dir)
    reload = partial(_read_again, args, config.runner.dtype, plan, shards) if params is None else None
    tree, seeds = jax.tree.structure(weights), random.Random(config.seed)
    replicas: list[Replica] = []
    for placement in where:
        runner = ModelRunner(config, weights, replace(shards, placement=placement))
        made = make_speculation(options, guesser, runner, args.use_tqdm_on_load)
        speculator = None if made is None else made.speculator
        if not args.enforce_eager:
            runner.warm_up(progress=args.use_tqdm_on_load)
            if speculator is not None:
                speculator.proposer.warm_up(args.use_tqdm_on_load)
        engine = Engine(config, runner, tokenizer, eos_token_ids=ends, speculation=speculator, seeds=seeds)
        source = partial(_params_of, replicas[0].runner, tree) if replicas else None
        sleep = Sleep(
            engine,
            runner,
            RestingWeights(runner, tree, reload, source),
            speculator.proposer if speculator else None,
            made.weights if made else None,
        )
        replicas.append(Replica(engine, runner, sleep, speculator))
    if defaults:
        logger.info("sampling defaults from the generation config, for calls without sampling_params: %s", defaults)
    return EngineParts(replicas, tokenizer, defaults, plan, shapes, shards)


def _settings(config: EngineConfig) -> tuple[object, ...]:
    """What decides about steps."""
    return config.model, config.cache, config.scheduler, config.runner.dtype, config.seed, config.speculation


def _params_of(runner: ModelRunner, tree: Any) -> Params:
    """The parameters as they lie on a replica's device."""
    return jax.tree.unflatten(tree, runner.leaves)


def _read_again(args: EngineArgs, dtype: str, plan: QuantPlan | None, shards: Shards) -> Params:
    """The parameters of the checkpoint that the engine was made from."""
    assert args.model is not None
    checkpoint = open_checkpoint(find_model(args, args.model, args.revision))
    return _read(checkpoint, dtype, plan, shards, args)


def _read(checkpoint: Checkpoint, dtype: str, plan: QuantPlan | None, shards: Shards, args: EngineArgs) -> Params:
    """The checkpoint's parameters, each device's part of each sent to it as soon as it has been read."""
    put = None if shards.placement == Placement() else shards.put
    return load_params(checkpoint, dtype, plan=plan, put=put, progress=args.use_tqdm_on_load)


def _check_source(args: EngineArgs, model_config: ModelConfig | None, params: Params | None) -> None:
    if model_config is not None and not isinstance(model_config, ModelConfig):
        raise TypeError(f"model_config={model_config!r} must be a jaxinfer.ModelConfig")
    if params is None and args.model is None:
        raise ValueError("model=None: give a model, or params with model_config")
    if params is None and model_config is not None:
        raise ValueError("model_config without params: a checkpoint brings its own architecture; leave it out")
    if params is not None and model_config is None and args.model is None:
        raise ValueError("params without model_config: say what the parameters are with model_config=ModelConfig(...)")


def find_model(args: EngineArgs, model: str | Path, revision: str | None, weights: bool = True) -> Path:
    """Where `args.model`, or the model a tokenizer is taken from, lies, after fetching it if need be.

    Raises:
        ValueError: there is no such model.
        ConnectionError: it has to be downloaded and the network does not answer.
    """
    token = None if args.hf_token is True else args.hf_token
    return resolve_model(model, revision=revision, token=token, weights=weights, cache_dir=default_cache_dir())


def make_tokenizer(args: EngineArgs, checkpoint: Checkpoint | None) -> Tokenizer | None:
    """The tokenizer that the arguments name, else the checkpoint's own; None where there is to be none."""
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer is None:
        try:
            return checkpoint.tokenizer() if checkpoint else None
        except ValueError as error:
            raise ValueError(f"{error}; or give another with tokenizer=, --tokenizer") from error
    if isinstance(args.tokenizer, str | Path):
        revision = args.tokenizer_revision or args.revision
        try:
            return load_tokenizer(find_model(args, args.tokenizer, revision, weights=False))
        except (ValueError, ConnectionError) as error:
            kind = ConnectionError if isinstance(error, ConnectionError) else ValueError
            raise kind(f"tokenizer={str(args.tokenizer)!r}: {error}") from error
    return args.tokenizer


def _end_ids(checkpoint: Checkpoint | None, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every id that anything names as an end; 0 is an id like any other."""
    named = checkpoint.eos_token_ids if checkpoint else frozenset()
    own = tokenizer.eos_token_id if tokenizer else None
    return named if own is None else named | {own}


def _config_and_params(
    args: EngineArgs,
    model: ModelConfig,
    checkpoint: Checkpoint | None,
    params: Params | None,
    plan: QuantPlan | None,
    guesser: Guesser | None,
    placement: Placement,
) -> tuple[EngineConfig, Params, Params, Shards]:
    """Also the parameters' shapes in floats. The sizes are settled before weights are read, so that what cannot fit or
    be split fails at once."""
    if params is not None:
        dtype = dtype_of_params(params) if args.dtype == "auto" else args.dtype
    else:
        assert checkpoint is not None
        dtype = resolve_dtype(args.dtype, checkpoint.dtype, jax.default_backend())
    floats = param_shapes(model, jax.numpy.dtype(dtype))
    shapes = floats if plan is None else plan.tree_shapes(floats)
    shards = shards_of(model, placement, shapes, splits_experts=args.enable_expert_parallel)
    if params is not None:
        params = match_params(params, model, dtype, plan, floats, shards)
    config = engine_config(args, model, dtype, params, plan, guesser, shards)
    shards = shards.of(config.model)
    if params is None:
        assert checkpoint is not None
        params = _read(checkpoint, dtype, plan, shards, args)
    return config, params, floats, shards
