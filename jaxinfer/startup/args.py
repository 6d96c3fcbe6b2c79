"""EngineArgs: what an engine is made from, with vLLM's names and defaults."""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxinfer.config import require_positive
from jaxinfer.startup.generation_config import check_override
from jaxinfer.startup.kv_dtype import named_kv_cache_dtype
from jaxinfer.startup.quantization import QuantOptions, checked_options, named_method, transformers_method
from jaxinfer.startup.speculation_options import SpeculativeOptions, speculative_options
from jaxinfer.startup.unbuilt import UNBUILT, without_unbuilt
from jaxinfer.tokenizers.tokenizer import Tokenizer

TOKENIZER_MEMBERS = ("vocab_size", "eos_token_id", "all_special_ids", "encode", "decode", "token_text")
_DTYPES = {"auto": "auto", "half": "float16", "float": "float32"} | {
    name: name for name in ("float32", "bfloat16", "float16")
}


@dataclass(frozen=True, init=False)
class EngineArgs:
    """Settings of one engine, checked when they are given. `LLM` and `AsyncLLM` take the same names as keywords.

    An argument of vLLM's that needs something jaxinfer does not have is refused by name, unless its value asks for
    nothing (`tensor_parallel_size=1`); see `jaxinfer.startup.unbuilt`. Sizes are plain ints.

    Args:
        model: folder or GGUF file, a Hub id such as "meta-llama/Llama-2-7b-hf", or "smollm2-135m-instruct". None only
            where live parameters are given instead.
        tokenizer: a tokenizer object, or where to read one; None takes the model's own.
        tokenizer_mode: "auto"; the kind of tokenizer is told from its files.
        skip_tokenizer_init: load no tokenizer; prompts must then be token ids and outputs have no text.
        dtype: of weights, activations and cache: "float32", "bfloat16", "float16", or "auto" for float32 on the CPU
            and the checkpoint's own elsewhere (live parameters: theirs everywhere).
        kv_cache_dtype: of the KV cache alone: "int8", "fp8" ("fp8_e4m3"), "fp8_e5m2" or "int4", with a float32 scale
            for each token and head; a name that dtype takes; "auto" is dtype.
        quantization: how the weights are stored, rounded tensor by tensor while they are read: "int8" (a scale for each
            output channel), "int8_w8a8" (activations are rounded to int8 as well, each token with a scale of its own),
            "fp8" (e4m3), "int4" (groups of 128), "nf4" or "fp4" (bitsandbytes' tables, blocks of 64), or "gguf", which
            takes over the codes of a file's Q4_0, Q4_1 and Q8_0 tensors and rounds the others to int8 in groups of 32.
            Norms, routers and, unless asked for, embedding and head stay as they are. None is dtype, or what a
            checkpoint that is quantised already says; its own method ("awq", "gptq", "compressed-tensors",
            "bitsandbytes", "fp8") may be given, too.
        quantization_config: options of `quantization`, see `jaxinfer.startup.quantization.QuantOptions`.
        load_in_8bit: transformers' name of quantization="int8".
        load_in_4bit: transformers' name of quantization="fp4" or "nf4", see the next.
        bnb_4bit_quant_type: with load_in_4bit, "nf4" or "fp4" (the default, as in transformers).
        bnb_4bit_compute_dtype: with load_in_4bit, the dtype of the activations: another name of `dtype`.
        bnb_4bit_use_double_quant: with load_in_4bit, whether the scales are quantised as well.
        llm_int8_skip_modules: with load_in_8bit or load_in_4bit, modules that stay in floats, as `skip_modules` of
            `QuantOptions`.
        device_map: "auto" or None: the devices of this process.
        data_parallel_size: replicas of the model, each on devices of its own, that serve one queue of requests; sizes
            such as max_num_seqs are those of each.
        tensor_parallel_size: devices that the model, or each replica of it, is split over: heads, feed-forward channels
            and vocabulary. It has to divide the number of query heads.
        enable_expert_parallel: with `tensor_parallel_size`, deal out a mixture's experts whole instead of cutting each.
        mesh: a `jax.sharding.Mesh` of the caller's to run on, in place of `tensor_parallel_size`; see `axis_names`.
        axis_names: the mesh's axis that the model is split over; None where only one splits anything. Along the other
            axes it lies whole.
        seed: seeds the requests that bring no seed of their own, 0 to 2**63 - 1.
        revision: branch, tag or commit of a Hub model.
        tokenizer_revision: the same for a `tokenizer` that is a Hub id; None takes `revision`.
        hf_token: token for a gated Hub model; True or None takes the one that `hf auth login` stored, False sends
            none.
        max_model_len: longest prompt plus output in tokens, at most what the model was trained for (the default).
        max_num_seqs: requests that run at the same time; the default depends on the device.
        max_num_batched_tokens: tokens computed in one step; the default depends on the device.
        gpu_memory_utilization: share of the whole device's memory this engine may use, above 0 and at most 1. Where
            it starts JAX, the whole process gets that share of the GPU; see `jaxinfer.startup.device_memory`.
        kv_cache_memory_bytes: bytes of the KV cache; overrides `gpu_memory_utilization`.
        num_gpu_blocks_override: blocks of the KV cache that requests can use; overrides both. May be too few for
            max_model_len: a prompt that does not fit is refused, an output that fills them ends with "length".
        block_size: tokens in a block of the KV cache.
        enable_prefix_caching: keep the keys and values of full blocks that nobody needs any more while there is room,
            and do not compute them again for a request that begins with the same tokens. None is True.
        enforce_eager: compile each program when it is first needed, instead of all of them at the start.
        compilation_cache_dir: folder where compiled programs are kept for the next start; None is a folder in
            `jaxinfer.cache_dir.default_cache_dir()`, False keeps none. The setting is the process's: a folder that
            is set in jax.config already stays.
        logits_processors: pure JAX functions `(logits[R, V], LogitsContext) -> logits[R, V]`, applied in order.
        scheduling_policy: "fcfs", or "priority" (lower values first).
        max_logprobs: most alternatives per token a request may ask for, -1 for the whole vocabulary.
        speculative_config: guess tokens ahead and verify several in one step, which changes no output: see
            `jaxinfer.startup.speculation_options.SpeculativeOptions` for the entries ({"method": "ngram"} or
            {"model": DRAFT, "num_speculative_tokens": 5}, for example).
        speculative_model: short for the entry `model`: a draft model, or "ngram".
        num_speculative_tokens: short for the entry of that name: an int, or "auto".
        generation_config: where `get_default_sampling_params()` comes from: "auto" is the model's
            generation_config.json, "vllm" is none (vLLM's defaults), else a folder with such a file.
        override_generation_config: entries that replace those of the generation config (an eos_token_id joins the
            other ends).
        deterministic: a request's tokens and log-probabilities are the same bits whatever the batch, the chunk sizes,
            prefix hits and preemptions, and those of `jaxinfer.training.token_logprobs(..., deterministic=True)`:
            tokens are computed in fixed tiles, see `jaxinfer.runner.fixed_tiles`. A step costs a whole number of tiles
            (32 tokens on the CPU, 128 on a GPU). Not together with speculation.
        disable_log_stats: do not write a line about the engine's load to the "jaxinfer" logger every ten seconds.
        use_tqdm_on_load: show progress bars while weights are read and programs are compiled.

    Raises:
        ValueError: a value is out of range or asks for something not built, naming argument, value and remedy.
        TypeError: an unknown argument, or a value of the wrong type.
    """

    model: str | Path | None = None
    tokenizer: str | Path | Tokenizer | None = None
    tokenizer_mode: str = "auto"
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    quantization_config: Mapping[str, Any] | None = None
    load_in_8bit: bool = False
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str | None = None
    bnb_4bit_compute_dtype: str | None = None
    bnb_4bit_use_double_quant: bool = False
    llm_int8_skip_modules: Sequence[str] | None = None
    device_map: str | None = None
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    enable_expert_parallel: bool = False
    mesh: Any = None
    axis_names: str | Sequence[str] | None = None
    seed: int = 0
    revision: str | None = None
    tokenizer_revision: str | None = None
    hf_token: str | bool | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int = 16
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    compilation_cache_dir: str | Path | bool | None = None
    logits_processors: tuple[Callable[..., Any], ...] = ()
    scheduling_policy: str = "fcfs"
    max_logprobs: int = 20
    speculative_config: Mapping[str, Any] | None = None
    speculative_model: str | Path | None = None
    num_speculative_tokens: int | str | None = None
    deterministic: bool = False
    generation_config: str | Path = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    disable_log_stats: bool = False
    use_tqdm_on_load: bool = True

    def __init__(self, model: str | Path | None = None, **arguments: Any) -> None:
        names = [item.name for item in fields(self)]
        given = {"model": model} | without_unbuilt(arguments, names, UNBUILT)
        for item in fields(self):
            value = given.get(item.name, item.default)
            if isinstance(value, numbers.Integral) and not isinstance(value, bool):
                value = int(value)  # numpy's
            object.__setattr__(self, item.name, value)
        self._check_numbers()
        self._check_choices()

    def _check_numbers(self) -> None:
        sizes = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes")
        counts = ("block_size", "data_parallel_size", "tensor_parallel_size")
        for name in (*sizes, "num_gpu_blocks_override", *counts):
            if name in counts or getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise TypeError(f"seed={self.seed!r} must be an int")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be from 0 to 2**63 - 1")
        share = self.gpu_memory_utilization
        is_number = isinstance(share, numbers.Real) and not isinstance(share, bool) and math.isfinite(share)
        if not is_number or not 0 < share <= 1:
            raise ValueError(
                f"gpu_memory_utilization={share!r} must be a number above 0 and at most 1: the share of the whole "
                "device's memory that this engine may use"
            )
        if isinstance(self.max_logprobs, bool) or not isinstance(self.max_logprobs, int):
            raise TypeError(f"max_logprobs={self.max_logprobs!r} must be an int")
        if self.max_logprobs < -1:
            raise ValueError(f"max_logprobs={self.max_logprobs} must be at least 0, or -1 for the whole vocabulary")

    def _check_choices(self) -> None:
        if self.model is not None and not isinstance(self.model, str | Path):
            raise TypeError(f"model={self.model!r} must be a path, a Hub id or a built-in name")
        if self.hf_token is not None and not isinstance(self.hf_token, str | bool):
            raise TypeError(f"hf_token={type(self.hf_token).__name__} must be a str, True, False or None")
        if self.enable_prefix_caching is None:  # vLLM's "as the model likes it"
            object.__setattr__(self, "enable_prefix_caching", True)
        for name in (
            "enable_prefix_caching",
            "skip_tokenizer_init",
            "enable_expert_parallel",
            "enforce_eager",
            "load_in_8bit",
            "load_in_4bit",
            "bnb_4bit_use_double_quant",
            "deterministic",
            "disable_log_stats",
            "use_tqdm_on_load",
        ):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        object.__setattr__(self, "dtype", _named_dtype("dtype", self.dtype))
        self._check_quantization()
        object.__setattr__(self, "kv_cache_dtype", named_kv_cache_dtype(self.kv_cache_dtype))
        if self.tokenizer_mode != "auto":
            raise ValueError(
                f"tokenizer_mode={self.tokenizer_mode!r} is not supported: the kind of tokenizer is told from its "
                "files. Leave it out (or give 'auto')."
            )
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling_policy={self.scheduling_policy!r} must be 'fcfs' or 'priority'")
        if self.compilation_cache_dir is True:
            raise ValueError("compilation_cache_dir=True names no folder; leave it out for the default one")
        if self.override_generation_config is not None:
            check_override(self.override_generation_config)
        self._check_mesh()
        self._check_logits_processors()
        self._check_tokenizer()
        if self.speculative_options is not None and self.deterministic:
            raise ValueError(
                "deterministic=True computes every token in a tile of its own rows, which verifying drafts does not do "
                "yet: leave out speculative_config (and its short forms), or deterministic"
            )
        if self.deterministic and (self.tensor_parallel_size > 1 or self.mesh is not None):
            raise ValueError(
                "deterministic=True fixes the sums of one device, not those that devices make together: leave out "
                "tensor_parallel_size and mesh, or deterministic"
            )
        if self.deterministic and 64 % self.block_size:
            raise ValueError(
                f"block_size={self.block_size} with deterministic=True must divide 64, the positions that attention "
                "takes at a time there; use 16"
            )

    def _check_mesh(self) -> None:
        if self.mesh is not None:
            from jax.sharding import Mesh  # command lines that only read options do without JAX

            if not isinstance(self.mesh, Mesh):
                raise TypeError(f"mesh={self.mesh!r} must be a jax.sharding.Mesh")
            if self.data_parallel_size != 1:
                raise ValueError(
                    f"data_parallel_size={self.data_parallel_size} makes replicas on meshes of their own, and mesh= is "
                    "one for all; give only one of them"
                )
        elif self.axis_names is not None:
            raise ValueError(f"axis_names={self.axis_names!r} names axes of a mesh; give mesh= as well")

    def _check_quantization(self) -> None:
        names = ("quantization", "load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype")
        given = {name: getattr(self, name) for name in (*names, "bnb_4bit_use_double_quant")}
        method = transformers_method(given)
        object.__setattr__(self, "quantization", method)
        options = self.quantization_config
        checked_options(method, options)
        if self.bnb_4bit_use_double_quant:
            options = {**(options or {}), "double_quant": True}
        if self.llm_int8_skip_modules is not None:
            if not (self.load_in_8bit or self.load_in_4bit):
                raise ValueError("llm_int8_skip_modules needs load_in_8bit=True or load_in_4bit=True")
            options = {**(options or {}), "skip_modules": list(self.llm_int8_skip_modules)}
            checked_options(method, options)
        object.__setattr__(self, "quantization_config", options)
        if self.bnb_4bit_compute_dtype is not None:
            dtype = _named_dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
            if self.dtype not in ("auto", dtype):
                raise ValueError(
                    f"bnb_4bit_compute_dtype={dtype!r} contradicts dtype={self.dtype!r}: there is one dtype for all "
                    "activations; give only one of them"
                )
            object.__setattr__(self, "dtype", dtype)
        if self.device_map not in (None, "auto"):
            raise ValueError(
                f"device_map={self.device_map!r} must be 'auto' (the devices of this process) or None; choose devices "
                "with jax.config 'jax_platforms' or CUDA_VISIBLE_DEVICES"
            )

    @property
    def quant_options(self) -> QuantOptions:
        """`quantization_config`, checked and completed."""
        return checked_options(named_method(self.quantization), self.quantization_config)

    @property
    def speculative_options(self) -> SpeculativeOptions | None:
        """The three arguments of speculation, checked and completed; None for none."""
        return speculative_options(self.speculative_config, self.speculative_model, self.num_speculative_tokens)

    def _check_logits_processors(self) -> None:
        processors = tuple(self.logits_processors or ())
        for processor in processors:
            if isinstance(processor, type) or not callable(processor):
                raise TypeError(
                    f"logits_processors holds {processor!r}; give pure JAX functions (logits, context) -> logits"
                )
        object.__setattr__(self, "logits_processors", processors)

    def _check_tokenizer(self) -> None:
        tokenizer = self.tokenizer
        if self.tokenizer_revision is not None and not isinstance(tokenizer, str):
            raise ValueError(
                f"tokenizer_revision={self.tokenizer_revision!r} is the revision of a Hub id given as tokenizer, and "
                f"tokenizer={tokenizer!r} is none; the model's own tokenizer comes from its revision"
            )
        if tokenizer is None:
            return
        if self.skip_tokenizer_init:
            raise ValueError(f"tokenizer={tokenizer!r} contradicts skip_tokenizer_init=True; give only one of them")
        missing = [name for name in TOKENIZER_MEMBERS if not hasattr(tokenizer, name)]
        if missing and not isinstance(tokenizer, str | Path):
            raise TypeError(
                f"tokenizer={tokenizer!r} has no {', '.join(missing)}; give a path, or an object with the members of "
                "jaxinfer.tokenizers.tokenizer.Tokenizer"
            )


def _named_dtype(name: str, value: Any) -> str:
    """A dtype's own name; jnp.float32, np.dtype("float32") and torch.float32 are welcome, too."""
    dtype = value if isinstance(value, str) else getattr(value, "__name__", str(value))
    dtype = dtype.removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ValueError(f"{name}={value!r} is not supported; use one of {', '.join(sorted(_DTYPES))}")
    return _DTYPES[dtype]


@dataclass(frozen=True, init=False)
class AsyncEngineArgs(EngineArgs):
    """EngineArgs under the name that vLLM's asynchronous samples use."""
