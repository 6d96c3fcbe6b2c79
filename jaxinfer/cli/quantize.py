"""`jaxinfer quantize`: a checkpoint of fewer bits."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.cli.convert import tidy_end
from jaxinfer.cli.human_int import human_int
from jaxinfer.cli.model_options import add_model_options, find_model

if TYPE_CHECKING:
    from jaxinfer.checkpoint.quantize import MatrixError, Quantization

METHODS = ("int8", "int8_w8a8", "fp8", "int4", "nf4", "fp4", "awq", "gptq")
DESCRIPTION = """\
Writes a model with quantised weights in a public layout, with its tokenizer, chat template and generation config.
`--model OUTPUT` serves what was written; vLLM and transformers read what the README says.

  int8, int8_w8a8, fp8   8 bits, a scale for each output channel (compressed-tensors); with int8_w8a8 activations are
                         rounded to int8 as well when it runs
  int4                   4 bits in groups (compressed-tensors)
  nf4, fp4               bitsandbytes' tables of 16 values, in blocks
  awq                    4 bits in groups; channels that activations are large in are scaled up before (AutoAWQ, gemm)
  gptq                   4 bits in groups; each input's rounding error is made up for by the inputs after it (GPTQ)

awq and gptq look at the activations of a calibration text, layer by layer; the others take as long as reading and
writing. Norms, routers and the embedding stay in floats.

A layer at a time is in memory, and the token table. OUTPUT appears when it is whole. A run that is killed or stopped
leaves a folder beside it that does not load, and the same command goes on at the layer where it stopped; awq and gptq
first run the text through the layers that are done. The result is the same to the last bit.
"""


def add_parser(commands: Any) -> None:
    """Adds the subcommand."""
    parser = commands.add_parser(
        "quantize",
        help="write a model with weights of 8 or 4 bits",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--model", required=True, metavar="MODEL", help="folder, GGUF file, Hub id or built-in name")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="new or empty folder")
    parser.add_argument("--method", required=True, choices=METHODS, help="see above")
    _add_format(parser)
    _add_calibration(parser)
    parser.add_argument(
        "--dtype",
        default="auto",
        metavar="DTYPE",
        help="of what is not quantised: float32, bfloat16 or float16; 'auto' is the checkpoint's own. Default: auto.",
    )
    parser.add_argument(
        "--max-shard-size",
        type=human_int,
        default="5G",
        metavar="BYTES",
        help="largest safetensors file, e.g. 500M or 2G. Default: 5G.",
    )
    add_model_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Returns 0."""
    from jaxinfer.checkpoint.output_directory import check_output
    from jaxinfer.checkpoint.quantize_options import QuantizeOptions

    options = {
        "bits": arguments.bits,
        "group_size": arguments.group_size,
        "symmetric": arguments.symmetric,
        "double_quant": arguments.double_quant,
        "quantize_head": arguments.quantize_head,
        "desc_act": arguments.desc_act,
        "static_groups": arguments.static_groups,
        "damp_percent": arguments.damp,
        "calibration": arguments.calibration,
        "num_samples": arguments.samples,
        "seq_len": arguments.seq_len,
    }
    QuantizeOptions(arguments.method, **options)  # before anything is downloaded
    check_output(arguments.output)

    from jaxinfer.checkpoint.quantize import quantize_checkpoint

    with tidy_end(), _told_how_to_go_on(arguments.output):
        done = quantize_checkpoint(
            find_model(arguments.model, arguments),
            arguments.output,
            arguments.method,
            **options,
            dtype=arguments.dtype,
            max_shard_bytes=arguments.max_shard_size,
            progress=sys.stderr.isatty(),
        )
    print(_summary(done))
    return 0


@contextlib.contextmanager
def _told_how_to_go_on(output: Path) -> Iterator[None]:
    from jaxinfer.checkpoint.resumable_directory import partial_of

    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if partial_of(output).exists():
            print(f"jaxinfer: stopped; the same command goes on with {partial_of(output)}", file=sys.stderr)
        raise


def _add_format(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("format")
    group.add_argument("--bits", type=int, metavar="N", help="of a code, 8 or 4; what the method has")
    group.add_argument(
        "--group-size",
        type=int,
        metavar="N",
        help="inputs that share a scale: 32, 64, 128 or 256, or -1 for all of an output channel (not with nf4 and "
        "fp4). Default: -1 with int8, else 128 (64 with nf4, fp4) or the largest below that divides all inputs.",
    )
    zero = group.add_mutually_exclusive_group()
    zero.add_argument(
        "--symmetric",
        action="store_true",
        default=None,
        help="int4, gptq: 0 is the code in the middle. Default; awq always has zero points.",
    )
    zero.add_argument(
        "--asymmetric", dest="symmetric", action="store_false", default=None, help="a zero point for each group"
    )
    group.add_argument("--double-quant", action="store_true", help="nf4, fp4: quantise the scales to 8 bits")
    group.add_argument("--quantize-head", action="store_true", help="8-bit methods: the output head as well")


def _add_calibration(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("calibration", "Of awq and gptq.")
    group.add_argument(
        "--calibration", metavar="FILE", help="text in UTF-8, or 'builtin', English prose. Default: builtin."
    )
    group.add_argument("--samples", type=human_int, metavar="N", help="pieces of the text. Default: 128.")
    group.add_argument("--seq-len", type=human_int, metavar="N", help="tokens of a piece. Default: 512.")
    group.add_argument(
        "--desc-act",
        action=argparse.BooleanOptionalAction,
        help="gptq: round the strongest inputs first (act-order), and group them in that order, which not every engine "
        "reads. Default: round them so, in groups of neighbours; --no-desc-act: round inputs as they come.",
    )
    group.add_argument(
        "--static-groups", action="store_true", default=None, help="gptq: groups of neighbours, also with --desc-act"
    )
    group.add_argument(
        "--damp",
        type=float,
        metavar="SHARE",
        help="gptq: share of the mean of the Hessian's diagonal that is added to it. Default: 0.01.",
    )


def _summary(done: "Quantization") -> str:
    """A table of the layers' errors, and a line on the whole."""
    share = done.nbytes / done.bytes_before
    line = (
        f"{done.path}: {done.layout}, the rest in {done.dtype}; {done.num_params:,} parameters, "
        f"{done.bytes_before:,} bytes before, {done.nbytes:,} after ({100 * share:.1f} %)"
    )
    return "\n".join([*_error_table(done.errors), line])


def _error_table(errors: Sequence["MatrixError"]) -> list[str]:
    """A line a layer and a column a kind of matrix; nothing without layers."""
    if not errors:
        return []
    rows: dict[str, dict[str, str]] = {}
    for one in errors:
        layer, _, kind = one.path.partition("/")
        cell = f"{100 * one.error:.3f}"
        if one.rounded is not None:
            cell += f" ({100 * one.rounded:.3f})"
        rows.setdefault(layer.removeprefix("layers_"), {})[kind.removesuffix("/kernel")] = cell
    kinds = sorted({kind for row in rows.values() for kind in row})
    calibrated = errors[-1].rounded is not None
    of = "outputs on the calibration text (of rounding to the nearest)" if calibrated else "weights"
    table = [["layer", *kinds], *([layer, *(row.get(kind, "") for kind in kinds)] for layer, row in rows.items())]
    widths = [max(len(row[column]) for row in table) for column in range(len(kinds) + 1)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return [f"Squared error of {of}, in % of the square of the original:", "", *lines, ""]
