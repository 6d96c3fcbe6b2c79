"""What quantising a checkpoint comes to: which layers, how they are written, and in which steps."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxinfer._version import __version__
from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.checkpoint.hf_export import exported_config
from jaxinfer.checkpoint.leaf_shapes import leaf_shapes
from jaxinfer.checkpoint.load import placements_by_leaf, read_leaf
from jaxinfer.checkpoint.quantised_files import WEIGHT
from jaxinfer.checkpoint.quantize_options import QuantizeOptions
from jaxinfer.checkpoint.save import PlannedTensor, plan_tensors
from jaxinfer.checkpoint.weight_map import head_name
from jaxinfer.quant.layouts.awq import AWQLayout
from jaxinfer.quant.layouts.bitsandbytes import BitsAndBytesLayout
from jaxinfer.quant.layouts.compressed_tensors import CompressedTensorsLayout
from jaxinfer.quant.layouts.gptq import GPTQLayout
from jaxinfer.quant.layouts.layout import Layout
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.quant.storage import FORMATS, Storage

OnBytes = Callable[[int], object]


@dataclass(frozen=True)
class QuantizeJob:
    """A checked request: nothing but headers has been read.

    Attributes:
        checkpoint: the source.
        options: with the group size settled.
        dtype: name of the dtype of what is not quantised.
        hf_config: what config.json will say.
        plan: which parameters are rounded and how, without looking at activations.
        storages: path -> format of the parameters that are quantised.
        tensors: path -> the tensors that a parameter is split into, in the order of `steps`.
        steps: paths of the parameters that are done together: first those of no layer, then layer by layer.
        layout: how matrices are written.
    """

    checkpoint: Checkpoint
    options: QuantizeOptions
    dtype: str
    hf_config: Mapping[str, Any]
    plan: QuantPlan
    storages: Mapping[str, Storage]
    tensors: Mapping[str, Sequence[PlannedTensor]]
    steps: tuple[tuple[str, ...], ...]
    layout: Layout

    @classmethod
    def of(cls, checkpoint: Checkpoint, options: QuantizeOptions, dtype: str) -> "QuantizeJob":
        """Raises ValueError where the method does not fit the model; names the option or the layer."""
        model = checkpoint.model_config
        if options.quantize_head and model.tie_word_embeddings:
            raise ValueError(
                "quantize_head=True: this model's head is its embedding, which stays in floats in a checkpoint; leave "
                "it out, and have it quantised while it is loaded (quantization_config={'quantize_head': True})"
            )
        family, hf_config = exported_config(checkpoint)
        tensors = plan_tensors(family, model, dtype)
        steps = _steps(leaf_shapes(model, dtype))
        in_order = {leaf: tensors[leaf] for step in steps for leaf in step}
        shapes = {leaf: spec.shape for leaf, spec in leaf_shapes(model, dtype).items()}
        whole = _plan(options)
        chosen = [leaf for leaf, shape in shapes.items() if whole.source(leaf, shape)]
        rows = {_module(tensor): _row(tensor, family.name) for leaf in chosen for tensor in tensors[leaf]}
        options = options.with_group(rows)
        plan = _plan(options)
        storages = {leaf: storage for leaf in chosen if (storage := plan.source(leaf, shapes[leaf])) is not None}
        skipped = [
            _module(tensor)
            for leaf in in_order
            if leaf.endswith("/kernel") and leaf not in storages
            for tensor in tensors[leaf]
        ]
        head = head_name(family, "hf").removesuffix(WEIGHT)
        if model.tie_word_embeddings:
            skipped.append(head)
        modules = {_module(tensor): storage for leaf, storage in storages.items() for tensor in tensors[leaf]}
        layout = layout_for(options, modules, skipped)
        others = [module for module in rows if not layout.covers(module)]
        if others:
            raise ValueError(f"{layout} has no place for {others[0]}; use another method")
        return cls(
            checkpoint=checkpoint,
            options=options,
            dtype=dtype,
            hf_config=hf_config,
            plan=plan,
            storages=storages,
            tensors=in_order,
            steps=steps,
            layout=layout,
        )

    def read(self, step: int, on_bytes: OnBytes = lambda count: None) -> Iterator[tuple[str, np.ndarray]]:
        """Path and values of a step's parameters: those that are quantised, and all of a calibrated method's layers,
        in float32."""
        specs = leaf_shapes(self.checkpoint.model_config, self.dtype)
        exact = leaf_shapes(self.checkpoint.model_config, "float32")
        everything = self.options.calibrated and step > 0
        wanted = {leaf: (exact if everything or leaf in self.storages else specs)[leaf] for leaf in self.steps[step]}
        if self.checkpoint.leaves is not None:
            from jaxinfer.checkpoint.orbax import read_own_leaves

            yield from read_own_leaves(self.checkpoint.path, wanted, on_bytes, some=True)
            return
        sources = placements_by_leaf(self.checkpoint)
        for leaf, spec in wanted.items():
            yield leaf, read_leaf(spec, sources[leaf], on_bytes)

    def identity(self, text: str | None) -> dict[str, Any]:
        """What decides the bytes of the result, by names that users know.

        Args:
            text: for calibration; None for none.
        """
        files = {placement.tensor.path for placement in self.checkpoint.placements} or {self.checkpoint.path}
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(files)]
        identity = {
            "model": str(self.checkpoint.path.resolve()),
            "model files": _digest(json.dumps(stats)),
            **self.options.identity(),
            "dtype": self.dtype,
            "jaxinfer": __version__,
        }
        if text is not None:
            identity |= {"calibration text": _digest(text), "device": jax.devices()[0].device_kind}
        return identity


def layout_for(options: QuantizeOptions, storages: Mapping[str, Storage], skipped: Sequence[str]) -> Layout:
    """The public layout that the method is written in.

    Args:
        options: with the group size settled.
        storages: the format of each linear layer that is quantised, by its name.
        skipped: linear layers that stay in floats.
    """
    group = -1 if options.group_size is None else options.group_size
    if options.method == "awq":
        return AWQLayout(group, tuple(skipped))
    if options.method == "gptq":
        ordered = bool(options.desc_act and not options.static_groups)
        return GPTQLayout(group=group, act_order=ordered, symmetric=bool(options.symmetric))
    if options.method == "nf4" or options.method == "fp4":
        return BitsAndBytesLayout(options.method, options.double_quant, tuple(skipped), group)
    return CompressedTensorsLayout.for_modules(storages, skipped)


def _plan(options: QuantizeOptions) -> QuantPlan:
    group = options.group_size
    if group is None:
        group = FORMATS[options.rounding].group
    return QuantPlan(
        options.rounding,
        group=0 if group == -1 else group,
        symmetric=options.symmetric is not False,
        head=options.quantize_head,
    )


def _steps(leaves: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    layers: dict[int, list[str]] = {}
    for leaf in leaves:
        first = leaf.split("/", 1)[0]
        layers.setdefault(int(first.removeprefix("layers_")) if first.startswith("layers_") else -1, []).append(leaf)
    return tuple(tuple(layers[index]) for index in sorted(layers))


def _module(tensor: PlannedTensor) -> str:
    return tensor.file.name.removesuffix(WEIGHT)


def _row(tensor: PlannedTensor, family: str) -> int:
    """Inputs of a linear layer."""
    if any(slot.axes and slot.item is None for slot in tensor.slots):
        raise ValueError(
            f"{family} keeps its weights as [in, out] ({_module(tensor)}), which no layout of quantised checkpoints "
            "does; have them quantised while they are loaded (quantization='int8', for example)"
        )
    return tensor.file.shape[1]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
