"""quantization, and transformers' load_in_8bit and load_in_4bit: what is asked for, and the plan that follows.

Imports JAX and NumPy only to make a plan.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, get_args

from jaxinfer.models.config import ModelConfig
from jaxinfer.quant.storage import FORMATS, CheckpointMethod, Method

if TYPE_CHECKING:
    from pathlib import Path

    from jaxinfer.checkpoint.checkpoint import Checkpoint
    from jaxinfer.quant.layouts.layout import Layout
    from jaxinfer.quant.plan import QuantPlan

AnyMethod = Method | CheckpointMethod
METHODS: tuple[Method, ...] = get_args(Method)
CHECKPOINT_METHODS: tuple[CheckpointMethod, ...] = get_args(CheckpointMethod)
_UNREAD_FORMATS = ("fbgemm_fp8", "modelopt", "torchao")
GROUP_SIZES = (16, 32, 64, 128, 256, -1)
_ALIASES = {"w8a8": "int8_w8a8", "bnb_4bit_use_double_quant": "double_quant"}
_ALIASES |= {"llm_int8_skip_modules": "skip_modules", "modules_to_not_convert": "skip_modules"}
_ALIASES |= {"awq_marlin": "awq", "gptq_marlin": "gptq"}  # vLLM's names of a kernel for what lies in the files


@dataclass(frozen=True)
class QuantOptions:
    """Entries of `quantization_config`; what is None is chosen by the method and the device.

    Args:
        group_size: neighbouring inputs of a channel that share a scale in "int8", "int4", "nf4" and "fp4": one of
            `GROUP_SIZES`, -1 for all of a channel. Where it is None, 128 for "int4", 64 for "nf4" and "fp4", and for
            "int8" all of a channel, but `DOWN_GROUP` in the last matrix of each layer. A matrix
            whose channels it does not divide takes the next smaller power of two that does, or else int8.
        symmetric: of "int4": False stores a zero point for each group as well.
        double_quant: of "nf4" and "fp4": whether the scales are quantised to 8 bits.
        quantize_head: whether the output head is stored in 8 bits, and with it the embedding that it is tied to; where
            it is None, for "int8_w8a8" on a CPU.
        quantize_embedding: whether the token embedding is stored in 8 bits.
        fast_form: whether matrices are turned into int8 per output channel after the method has rounded them, and
            inputs of "int8_w8a8" are rotated (`jaxinfer.quant.rotation`); where it is None, on a CPU, which multiplies
            nothing else quickly.
        skip_modules: modules that stay in floats, by Hugging Face's names of them, their ends or regular expressions of
            their beginnings ("lm_head", "down_proj", "model.layers.0"); also "llm_int8_skip_modules". See
            `jaxinfer.checkpoint.skipped_parameters`.
    """

    group_size: int | None = None
    symmetric: bool = True
    double_quant: bool = False
    quantize_head: bool | None = None
    quantize_embedding: bool = False
    fast_form: bool | None = None
    skip_modules: tuple[str, ...] = ()


def named_method(value: object) -> AnyMethod | None:
    """The method of that name, None for None: that of the checkpoint.

    Raises:
        ValueError: there is none, or it is the format of a checkpoint that cannot be read yet.
    """
    if value is None:
        return None
    name = _ALIASES.get(str(value), str(value))
    for method in (*METHODS, *CHECKPOINT_METHODS):
        if name == method:
            return method
    known = ", ".join(METHODS)
    if name in _UNREAD_FORMATS:
        raise ValueError(
            f"quantization={value!r} is not supported: checkpoints in this format cannot be read yet. Load the "
            f"unquantised checkpoint and have it quantised while it is read, with one of {known}"
        )
    raise ValueError(
        f"quantization={value!r} is not supported; use one of {known}, or leave it out for floats and for a checkpoint "
        f"that is quantised already, whose own may be given: {', '.join(CHECKPOINT_METHODS)}"
    )


def checked_options(method: AnyMethod | None, given: Mapping[str, Any] | None) -> QuantOptions:
    """`quantization_config` as options.

    Args:
        method: that was asked for; None for that of the checkpoint, if it has one, which `quant_plan` finds out.
        given: the mapping; None for no options.

    Raises:
        ValueError: an entry is unknown, out of range, or of no use with the method.
        TypeError: not a mapping, or a value of the wrong type.
    """
    if given is None:
        return QuantOptions()
    if not isinstance(given, Mapping):
        raise TypeError(
            f"quantization_config={given!r} must be a mapping, such as {{'group_size': 64}} with quantization='int4'; "
            "for transformers' BitsAndBytesConfig give load_in_8bit or load_in_4bit and bnb_4bit_... themselves"
        )
    values = {_ALIASES.get(name, name): value for name, value in given.items()}
    kinds = {item.name: item for item in fields(QuantOptions)}
    for name, value in values.items():
        if name not in kinds:
            raise ValueError(f"quantization_config has an unknown entry {name!r}; it takes {', '.join(kinds)}")
        if name == "group_size":
            if value is not None and (isinstance(value, bool) or value not in GROUP_SIZES):
                allowed = ", ".join(map(str, GROUP_SIZES))
                raise ValueError(f"group_size={value!r} must be one of {allowed} (-1 is all of a channel)")
        elif name == "skip_modules":
            values[name] = _patterns(value)
        elif not isinstance(value, bool) and not (value is None and kinds[name].default is None):
            raise TypeError(f"quantization_config's {name}={value!r} must be True or False")
    options = QuantOptions(**values)
    if method is not None:
        _check_uses(method, options)
    elif options.group_size is not None or not options.symmetric or options.double_quant or options.skip_modules:
        refuse_without_method(options)  # these are no quantised checkpoint's either
    return options


def _patterns(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise TypeError(f"quantization_config's skip_modules={value!r} must be a list of names, such as [{value!r}]")
    from jaxinfer.quant.layouts.skipped_modules import checked_patterns

    return checked_patterns("skip_modules", value) or ()


def refuse_without_method(options: QuantOptions) -> None:
    """Raises ValueError where options are given and nothing is quantised."""
    given = {item.name: value for item in fields(options) if (value := getattr(options, item.name)) != item.default}
    if given:
        raise ValueError(
            f"quantization_config without quantization: {given} needs a method, such as quantization='int4', or a "
            "checkpoint that is quantised already, which takes fast_form, quantize_head and quantize_embedding"
        )


def _check_uses(method: AnyMethod, options: QuantOptions) -> None:
    if method in CHECKPOINT_METHODS:
        for name in ("group_size", "double_quant", "skip_modules"):
            given = getattr(options, name)
            if given:
                raise ValueError(f"{name}={given!r} is the checkpoint's own with quantization={method!r}; leave it out")
    elif options.group_size is not None and FORMATS[method].bits != 4 and method != "int8":
        raise ValueError(f"group_size={options.group_size} is of 'int8' and 4 bits; {method!r} has a scale a channel")
    if not options.symmetric and method != "int4":
        raise ValueError(f"symmetric=False is of quantization='int4', not of {method!r}")
    if options.double_quant and method not in ("nf4", "fp4"):
        raise ValueError(f"double_quant=True is of quantization='nf4' and 'fp4', not of {method!r}")


def transformers_method(args: Mapping[str, Any]) -> AnyMethod | None:
    """The method that transformers' arguments name: 8 bits are "int8", 4 bits what `bnb_4bit_quant_type` says.

    Args:
        args: `quantization` (a method or None) and transformers' arguments by their names.

    Raises:
        ValueError: they contradict each other or `quantization`, or one is of no use.
    """
    quantization, quant_type = args["quantization"], args["bnb_4bit_quant_type"]
    if quant_type not in (None, "nf4", "fp4"):
        raise ValueError(f"bnb_4bit_quant_type={quant_type!r} must be 'nf4' or 'fp4'")
    if args["load_in_8bit"] and args["load_in_4bit"]:
        raise ValueError("load_in_8bit=True contradicts load_in_4bit=True; give only one of them")
    if not args["load_in_4bit"]:
        for name in ("bnb_4bit_quant_type", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant"):
            if args[name]:
                raise ValueError(f"{name}={args[name]!r} needs load_in_4bit=True")
        if not args["load_in_8bit"]:
            return named_method(quantization)
    method: Method = "int8" if args["load_in_8bit"] else "nf4" if quant_type == "nf4" else "fp4"
    if quantization not in (None, method):
        name = "load_in_8bit" if args["load_in_8bit"] else "load_in_4bit"
        remedy = "give only one of them"
        if args["load_in_4bit"] and quantization in ("nf4", "fp4"):
            remedy += f", or bnb_4bit_quant_type={quantization!r} as well"
        raise ValueError(
            f"{name}=True is quantization={method!r}, which contradicts quantization={quantization!r}; {remedy}"
        )
    return method


def quant_plan(
    method: AnyMethod | None,
    options: QuantOptions,
    model: ModelConfig,
    checkpoint: "Checkpoint | None",
    platform: str,
    num_parts: int = 1,
) -> "QuantPlan | None":
    """Which parameters are quantised, and how; None for none.

    Args:
        method: what was asked for.
        options: its options.
        model: the architecture.
        checkpoint: where the weights come from; None for live parameters.
        platform: JAX's name of the device's platform.
        num_parts: devices that the model is split over.

    Raises:
        ValueError: "gguf" for what is no GGUF file; or the checkpoint is quantised in another way than asked for, or
            not at all; or there are options and no method.
    """
    layout = None if checkpoint is None else checkpoint.layout
    if checkpoint is not None and layout is not None:
        method = _agreed(method, layout, checkpoint.path)
    elif method in CHECKPOINT_METHODS:
        source = "live parameters are" if checkpoint is None else f"{checkpoint.path} is"
        raise ValueError(
            f"quantization={method!r}, but {source} not quantised in that way (no quantization_config says so). Make "
            "such a checkpoint with `jaxinfer quantize`, or have this one quantised while it is read: "
            f"quantization={'nf4' if method == 'bitsandbytes' else 'int4'!r}, for example"
        )
    if method is None:
        refuse_without_method(options)
        return None
    from jaxinfer.quant.plan import DOWN_GROUP, QuantPlan

    on_cpu = platform == "cpu"
    floats: frozenset[str] = frozenset()
    if options.skip_modules:
        from jaxinfer.checkpoint.skipped_parameters import skipped_parameters

        floats = skipped_parameters(options.skip_modules, model, checkpoint)
    head = options.quantize_head
    if head is None:
        head = on_cpu and method == "int8_w8a8"
    group = options.group_size
    plan = QuantPlan(
        method,
        group=0 if group == -1 else group,
        symmetric=options.symmetric,
        double=options.double_quant,
        down_group=DOWN_GROUP,
        head=head,
        embedding=options.quantize_embedding or (head and model.tie_word_embeddings),
        fast_form=on_cpu if options.fast_form is None else options.fast_form,
        floats=floats,
        num_parts=num_parts,
    )
    if checkpoint is not None and layout is not None:
        from jaxinfer.checkpoint.packed_codes import packed_storages

        return replace(plan, kept=packed_storages(checkpoint), only_kept=True)
    if method != "gguf":
        return plan
    if checkpoint is None or checkpoint.metadata is None:
        source = "live parameters" if checkpoint is None else str(checkpoint.path)
        raise ValueError(f"quantization='gguf' keeps the codes of a GGUF file, and {source} is none; use 'int8', ...")
    from jaxinfer.checkpoint.gguf_codes import kept_storages

    kept = {path: storage for path, storage in kept_storages(checkpoint).items() if path not in floats}
    return replace(plan, kept=kept)


def _agreed(method: AnyMethod | None, layout: "Layout", source: "Path") -> AnyMethod:
    """The method of a quantised checkpoint, if what was asked for is that.

    Raises:
        ValueError: it is another; names both.
    """
    if method is None or method in layout.names:
        return layout.method  # type: ignore[return-value]
    asked = f"quantization={method!r}"
    if method in ("int8", "nf4", "fp4"):
        asked += f" (or transformers' load_in_{FORMATS[method].bits}bit=True)"
    raise ValueError(
        f"{asked} was asked for, but {source} is quantised as {layout}; leave that out, or load the unquantised "
        "checkpoint"
    )
