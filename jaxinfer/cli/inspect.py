"""`jaxinfer inspect`: what a checkpoint is, from its headers."""

import argparse
import json
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.engine_options import json_object
from jaxinfer.cli.model_options import add_model_options, find_model

if TYPE_CHECKING:
    from jaxinfer.checkpoint.checkpoint import Checkpoint

DESCRIPTION = """\
Prints what a model is: architecture, parameters, bytes, quantisation, context, rotary positions, special tokens, chat
template, and what a token costs in the KV cache. Only headers are read, never weights. Of a Hub id whose weights are
not here, config and tokenizer are downloaded, and parameters and bytes are what the config asks for. (A built-in name
that is not here yet is downloaded.)
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "inspect",
        help="describe a model",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, Hub id or built-in name")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quantization", metavar="METHOD", help="also tell how an engine on this machine stores it")
    parser.add_argument(
        "--quantization-config", metavar="JSON", type=json_object('{"group_size": 64}'), help="options of the method"
    )
    parser.add_argument("--dtype", metavar="DTYPE", default="auto", help="of what is not quantised")
    add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0."""
    from jaxinfer.checkpoint.checkpoint import open_checkpoint
    from jaxinfer.checkpoint.summary import summarise

    path = find_model(arguments.model, arguments, weights=False)
    checkpoint = open_checkpoint(path, needs_weights=False)
    facts = summarise(checkpoint)
    stored_quantised = checkpoint.layout is not None and checkpoint.has_weights
    asked = arguments.quantization is not None or arguments.quantization_config
    if stored_quantised or (asked and checkpoint.layout is None):
        facts["stored_as"] = _stored(checkpoint, arguments)
    if arguments.json:
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print("\n".join(f"{label + ':':<19} {text}" for label, text in _lines(facts)))
    return 0


def _stored(checkpoint: "Checkpoint", arguments: argparse.Namespace) -> dict[str, Any]:
    """What an engine on the default device would make of the weights."""
    import jax

    from jaxinfer.checkpoint.load import resolve_dtype
    from jaxinfer.models.decoder import param_shapes
    from jaxinfer.quant.summary import summarise_plan
    from jaxinfer.startup.args import EngineArgs
    from jaxinfer.startup.quantization import named_method, quant_plan

    options = {name: getattr(arguments, name) for name in ("quantization", "quantization_config", "dtype")}
    args = EngineArgs(arguments.model, **options)
    platform = jax.default_backend()
    model = checkpoint.model_config
    plan = quant_plan(named_method(args.quantization), args.quant_options, model, checkpoint, platform)
    assert plan is not None
    dtype = resolve_dtype(args.dtype, checkpoint.dtype, platform)
    return {"device": platform} | summarise_plan(plan, param_shapes(model, dtype))


def _lines(facts: dict[str, Any]) -> list[tuple[str, str]]:
    from jaxinfer.startup.generation_config import SAMPLING_FIELDS

    heads, rope, generation = facts["heads"], facts["rope"], facts["generation_config"]
    return [
        ("path", facts["path"]),
        ("format", facts["format"]),
        ("architecture", facts["architecture"]),
        ("layers", f"{facts['layers']}, width {facts['hidden_size']}, feed-forward {facts['intermediate_size']}"),
        ("heads", f"{heads['query']} query, {heads['key_value']} key/value, width {heads['width']}"),
        ("vocabulary", f"{facts['vocab_size']:,}" + (", head tied to the embedding" if facts["tied_head"] else "")),
        ("parameters", f"{facts['parameters']:,}"),
        ("bytes", _bytes(facts)),
        ("quantisation", _quantisation(facts)),
        *_stored_line(facts),
        ("context", f"{facts['context']:,} tokens"),
        ("rope", f"theta {rope['theta']:g}, " + (_named(rope["scaling"]) or "no scaling")),
        ("other settings", _named(facts["other_settings"]) or "none"),
        ("tokenizer", _tokenizer(facts["tokenizer"])),
        ("special tokens", _special(facts)),
        ("ends", ", ".join(map(str, facts["eos_token_ids"])) or "none named"),
        ("chat template", "yes" if facts["chat_template"] else "no"),
        ("sampling defaults", _named({key: generation[key] for key in SAMPLING_FIELDS if key in generation}) or "none"),
        ("KV bytes a token", ", ".join(f"{name} {n:,}" for name, n in facts["kv_bytes_per_token"].items())),
    ]


def _bytes(facts: dict[str, Any]) -> str:
    by_dtype = ", ".join(f"{name} {count:,}" for name, count in facts["bytes_by_dtype"].items())
    source = "of the model in floats" if facts["quantisation"] else "by the config"
    return f"{facts['bytes']:,}: {by_dtype}" + ("" if facts["weights"] else f" ({source}; no weights are here)")


def _quantisation(facts: dict[str, Any]) -> str:
    tensors = facts["quantised_tensors"]
    if facts["quantisation"] is not None:
        matrices = sum(tensors.values())
        return facts["quantisation"] + (f" ({matrices} matrices)" if matrices else "")
    return ", ".join(f"{name} ({_tensors(n)})" for name, n in tensors.items()) or "none"


def _stored_line(facts: dict[str, Any]) -> list[tuple[str, str]]:
    stored = facts.get("stored_as")
    if stored is None:
        return []
    from jaxinfer.quant.summary import format_lines

    return [(f"{stored['method']} on {stored['device']}", format_lines(stored))]


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _tokenizer(facts: dict[str, Any]) -> str:
    if facts.get("error"):
        return f"none ({facts['error']})"
    return f"{facts['kind']}, {facts['vocab_size']:,} ids, {facts['num_special_tokens']} of them special"


def _special(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {token['text']} ({token['id']})" for name, token in facts["special_tokens"].items()) or (
        "none"
    )


def _named(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {_short(value)}" for name, value in values.items())


def _short(value: Any) -> str:
    """A long list of numbers by its ends, a group of settings in brackets after its kind."""
    if isinstance(value, dict):
        return f"{value['kind']} ({_named({name: item for name, item in value.items() if name != 'kind'})})"
    if isinstance(value, list) and len(value) > 8:
        return (
            f"{len(value)} values, {value[0]:g} to {value[-1]:g}" if isinstance(value[0], float) else f"{value[:8]}..."
        )
    return f"{value:g}" if isinstance(value, float) else str(value)
