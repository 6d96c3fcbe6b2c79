"""From any checkpoint in floats to a quantised one in a public layout, a layer at a time."""

import shutil
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.calibration.layer_result import CalibratedMethod
from jaxinfer.calibration.text import calibration_samples, calibration_text
from jaxinfer.checkpoint.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoint.convert import MAX_SHARD_BYTES, take_tokenizer, write_json
from jaxinfer.checkpoint.finished_layers import FinishedLayers
from jaxinfer.checkpoint.leaf_shapes import leaf_shapes, nested
from jaxinfer.checkpoint.load import resolve_dtype, stored_bytes
from jaxinfer.checkpoint.output_directory import check_output, check_room
from jaxinfer.checkpoint.quantised_files import QuantisedFiles
from jaxinfer.checkpoint.quantize_job import QuantizeJob
from jaxinfer.checkpoint.quantize_options import OfflineMethod, QuantizeOptions
from jaxinfer.checkpoint.resumable_directory import Work, partial_of, resumable_directory
from jaxinfer.progress_bar import ProgressBar
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.quantize import dequantized
from jaxinfer.tokenizers.tokenizer import Tokenizer

ERROR_CHUNK = 1 << 22  # values that errors are counted over at a time
LAYERS = "layers"
"""Folder of the layers that a calibrated method is done with."""


@dataclass(frozen=True)
class MatrixError:
    """What quantising did to one matrix.

    Attributes:
        path: of the parameter, e.g. "layers_0/attn/qkv/kernel".
        error: with calibration, of its outputs on the calibration text, else of its values: the squared norm of the
            difference over that of the original.
        rounded: with calibration, what rounding to the nearest would have given; else None.
    """

    path: str
    error: float
    rounded: float | None = None


@dataclass(frozen=True)
class Quantization:
    """What was written.

    Attributes:
        path: the directory.
        method: as it was asked for.
        layout: the public layout, in words.
        dtype: of what is not quantised.
        num_params: number of values.
        bytes_before: of the tensors that were read.
        nbytes: of the tensors that were written.
        errors: of each quantised matrix, in the order of the layers.
        tokenizer: whether the model came with a tokenizer, which lies beside the weights now.
    """

    path: Path
    method: OfflineMethod
    layout: str
    dtype: str
    num_params: int
    bytes_before: int
    nbytes: int
    errors: tuple[MatrixError, ...]
    tokenizer: bool


def quantize_checkpoint(
    model: str | Path,
    output: str | Path,
    method: OfflineMethod,
    *,
    bits: int | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    double_quant: bool = False,
    quantize_head: bool = False,
    desc_act: bool | None = None,
    static_groups: bool | None = None,
    damp_percent: float | None = None,
    calibration: str | Path | None = None,
    num_samples: int | None = None,
    seq_len: int | None = None,
    dtype: str = "auto",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: bool = False,
) -> Quantization:
    """Writes a quantised model directory in a public layout, which `LLM(output)` serves.

    "int8", "int8_w8a8", "fp8" and "int4" are written as compressed-tensors, "nf4" and "fp4" as bitsandbytes, "awq" as
    AutoAWQ's gemm version, "gptq" as GPTQ's version 1. Norms, routers, embedding and, unless asked for, the head stay
    in floats.

    A layer at a time is in memory, and the token table. The directory appears when it is whole. A killed or interrupted
    process leaves ``.NAME.partial-resumable`` beside it, which does not load; the same call again goes on at the layer
    where it stopped, and gives the same bytes as one that was not interrupted. With "awq" and "gptq" it first runs the
    calibration text through the layers that are done, which takes a forward pass of each.

    Args:
        model: a GGUF file, a Hugging Face directory, or an Orbax directory that `save_checkpoint` wrote; in floats or
            GGUF's types.
        output: a directory that does not exist yet or is empty.
        method: "int8", "int8_w8a8", "fp8", "int4", "nf4", "fp4" (see `LLM`), "awq" (arXiv:2306.00978) or "gptq"
            (arXiv:2210.17323).
        bits: of a code: what the method has, 8 or 4.
        group_size: of "int8" and 4-bit methods: inputs that share a scale, 32, 64, 128 or 256, or -1 for all of an
            output channel (not with "nf4" and "fp4"). None is -1 with "int8", else 128, 64 with "nf4" and "fp4", or
            the largest below that divides the inputs of every layer.
        symmetric: of "int4" and "gptq": False stores a zero point for each group. None is True; "awq" always has them.
        double_quant: of "nf4" and "fp4": whether the scales are quantised to 8 bits.
        quantize_head: of 8-bit methods: whether the output head is quantised as well.
        desc_act: of "gptq": whether inputs are rounded in the order of how strong they are ("act-order"), which None
            does, too, with `static_groups`. True alone also groups them in that order, which costs a gather of the
            activations and is not read by every engine.
        static_groups: of "gptq": groups are of neighbouring inputs whatever the order. None is whether `desc_act` is
            None.
        damp_percent: of "gptq": share of the mean of the Hessian's diagonal that is added to it. None is 0.01.
        calibration: of "awq" and "gptq": a text file in UTF-8, or "builtin" (None).
        num_samples: of "awq" and "gptq": pieces of the text that are run through the model. None is 128.
        seq_len: of "awq" and "gptq": tokens of a piece. None is 512.
        dtype: of what is not quantised: "float32", "bfloat16", "float16", or "auto" for the checkpoint's own.
        max_shard_bytes: size of a safetensors file, unless a single tensor is larger.
        progress: show a progress bar.

    Warns:
        UserWarning: the calibration text has fewer tokens than a matrix has inputs.

    Raises:
        ValueError: an option is out of range or of no use with the method, the model does not load, is quantised
            already or, where it is calibrated, has no tokenizer, a group does not divide a layer's inputs, the layout
            cannot hold a layer, a weight is not finite, the output is not free or an unfinished run of another kind
            lies there, or its disk has no room.
        OSError: writing failed; nothing is left, but for what is whole and could not get its name.
    """
    options = QuantizeOptions(
        method, bits, group_size, symmetric, double_quant, quantize_head, desc_act, static_groups, damp_percent,
        calibration, num_samples, seq_len,
    )  # fmt: skip
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    check_output(output)
    text = calibration_text(options.calibration) if options.calibration is not None else None
    checkpoint = open_checkpoint(Path(model).expanduser())
    if checkpoint.layout is not None:
        raise ValueError(f"{checkpoint.path} is quantised already ({checkpoint.layout}); give the model in floats")
    dtype = checkpoint.dtype if dtype == "auto" else resolve_dtype(dtype, checkpoint.dtype, "any")
    job = QuantizeJob.of(checkpoint, options, dtype)
    partial = partial_of(output)
    files = QuantisedFiles(
        partial,
        job.tensors,
        job.storages,
        job.layout,
        double=options.double_quant,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
    samples = None
    if text is not None:
        assert options.num_samples is not None and options.seq_len is not None
        samples = calibration_samples(_tokenizer(checkpoint, method), text, options.num_samples, options.seq_len)
        _warn_of_few_tokens(job, samples)
    check_room(output, _needed(files, options) - _held(partial))
    with resumable_directory(output, {**job.identity(text), "max_shard_bytes": max_shard_bytes}) as work:
        return _Run(job, files, work, samples, progress).finish(Path(output))


def _tokenizer(checkpoint: Checkpoint, method: OfflineMethod) -> Tokenizer:
    try:
        return checkpoint.tokenizer()
    except ValueError as error:
        raise ValueError(
            f"{method!r} runs a text through the model, which needs its tokenizer: {error}; or use a method that looks "
            "at the weights alone, such as 'int4'"
        ) from error


def _warn_of_few_tokens(job: QuantizeJob, samples: np.ndarray) -> None:
    """Fewer tokens than a matrix has inputs span only a part of what the inputs can be."""
    widest = max(tensor.file.shape[1] for leaf in job.storages for tensor in job.tensors[leaf])
    if samples.size < widest:
        pieces, tokens = samples.shape
        warnings.warn(
            f"the calibration text's {pieces} x {tokens} = {samples.size} tokens are fewer than the {widest} inputs of "
            f"the widest matrix, too few to calibrate {job.options.method!r} well; take more or longer pieces "
            "(num_samples, --samples; seq_len, --seq-len)",
            stacklevel=3,
        )


def _needed(files: QuantisedFiles, options: QuantizeOptions) -> int:
    return files.nbytes * (2 if options.method == "gptq" else 1)  # finished layers are kept twice until the end


def _held(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0


class _Run:
    """One process's share of the work."""

    def __init__(
        self, job: QuantizeJob, files: QuantisedFiles, work: Work, samples: np.ndarray | None, progress: bool
    ) -> None:
        self._job, self._files, self._work, self._samples, self._progress = job, files, work, samples, progress
        self._layers = FinishedLayers(work.folder / LAYERS)
        if not files.are_there():
            work.progress = {}
            files.create()
        self._done: int = work.progress.get("steps", 0)
        self._errors: list[dict[str, Any]] = work.progress.get("errors", [])

    def finish(self, output: Path) -> Quantization:
        """Does the steps that are left, and what comes after them."""
        try:
            if self._done == len(self._job.steps):
                pass  # only the small files were missing
            elif self._samples is None:
                self._round()
            else:
                self._calibrate(self._samples)
        finally:
            self._files.close()
        checkpoint, folder = self._job.checkpoint, self._work.folder
        shutil.rmtree(folder / LAYERS, ignore_errors=True)
        nbytes = self._files.write_index()
        has_tokenizer = take_tokenizer(checkpoint, folder)
        if checkpoint.generation_config:
            write_json(folder / "generation_config.json", checkpoint.generation_config)
        config = dict(self._job.hf_config)
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = self._job.dtype
        config["quantization_config"] = self._job.layout.config()
        write_json(folder / "config.json", config)  # last: without it nothing loads
        return Quantization(
            path=output,
            method=self._job.options.method,
            layout=str(self._job.layout),
            dtype=self._job.dtype,
            num_params=sum(spec.size for spec in leaf_shapes(checkpoint.model_config, self._job.dtype).values()),
            bytes_before=stored_bytes(checkpoint),
            nbytes=nbytes,
            errors=tuple(MatrixError(**error) for error in self._errors),
            tokenizer=has_tokenizer,
        )

    def _round(self) -> None:
        """Without calibration: a parameter at a time."""
        job = self._job
        with ProgressBar(
            total=stored_bytes(job.checkpoint),
            desc=f"Quantizing to {job.options.method}",
            unit="B",
            unit_scale=True,
            disable=not self._progress,
        ) as bar:
            for step in range(len(job.steps)):
                if step < self._done:
                    bar.update(sum(placement.nbytes for placement in self._placements(step)))
                    continue
                for leaf, values in job.read(step, bar.update):
                    stored = job.plan.apply(leaf, values, job.dtype)
                    if isinstance(stored, QuantArray):
                        self._errors.append(asdict(MatrixError(leaf, _relative_error(values, stored))))
                    self._files.write(leaf, stored)
                self._remember(step)

    def _calibrate(self, samples: np.ndarray) -> None:
        """With calibration: a layer at a time."""
        from jaxinfer.calibration.layerwise import quantise_layers

        job, options = self._job, self._job.options
        if self._done == 0:
            for leaf, values in job.read(0):
                self._files.write(leaf, values)
            self._remember(0)
        method = CalibratedMethod(
            name=options.method,  # type: ignore[arg-type]
            bits=options.code_bits,
            group=0 if options.group_size == -1 else options.group_size or 0,
            symmetric=bool(options.symmetric),
            act_order=bool(options.desc_act),
            static_groups=bool(options.static_groups),
            damping=options.damp_percent or 0.01,
            dtype=job.dtype,
        )
        with ProgressBar(
            total=len(job.steps) - 1,
            initial=self._done - 1,
            desc=f"Quantizing with {options.method}",
            unit="layer",
            disable=not self._progress,
        ) as bar:
            for result in quantise_layers(
                job.checkpoint.model_config,
                nested({leaf: values for leaf, values in job.read(0) if leaf.startswith("embed")}),
                lambda index: dict(job.read(index + 1)),
                method,
                samples,
                finished=self._finished,
            ):
                for leaf in job.steps[result.index + 1]:
                    self._files.write(leaf, result.params[leaf])
                if options.method == "gptq":
                    self._layers.save(result.index, result.params)
                layer = f"layers_{result.index}/"
                self._errors += [
                    asdict(MatrixError(layer + one.path.removeprefix(layer), one.error, one.rounded))
                    for one in result.reports
                ]
                self._remember(result.index + 1)
                bar.update()

    def _finished(self, index: int) -> Mapping[str, np.ndarray | QuantArray] | None:
        """A layer of an earlier run, as `quantise_layers` takes it: "awq" goes on from the original ones."""
        if index + 1 >= self._done:
            return None
        return self._layers.load(index) if self._job.options.method == "gptq" else {}

    def _remember(self, step: int) -> None:
        self._files.sync()
        self._work.save({"steps": step + 1, "errors": self._errors})

    def _placements(self, step: int) -> Iterator[Any]:
        wanted = set(self._job.steps[step])
        return (placement for placement in self._job.checkpoint.placements if placement.slot.leaf in wanted)


def _relative_error(values: np.ndarray, stored: QuantArray) -> float:
    """``|W' - W|^2 / |W|^2``; 0 for a matrix of zeros."""
    rows = values.reshape(stored.channels, stored.row)
    parts = [
        None if part is None else np.asarray(part).reshape(stored.channels, -1)
        for part in (stored.codes, stored.scale, stored.offset)
    ]
    step = max(1, ERROR_CHUNK // stored.row)
    lost = norm = 0.0
    for start in range(0, stored.channels, step):
        original = rows[start : start + step].astype(np.float32).reshape(-1)
        codes, scale, offset = (None if part is None else part[start : start + step] for part in parts)
        shape = original.size // stored.row, stored.row
        chunk = replace(stored, codes=codes, scale=scale, offset=offset, shape=shape, axis=1)
        difference = dequantized(chunk).reshape(-1) - original
        lost += float(np.dot(difference, difference))
        norm += float(np.dot(original, original))
    return lost / norm if norm else 0.0
