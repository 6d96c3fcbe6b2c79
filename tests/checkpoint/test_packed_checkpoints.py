"""Quantised Hugging Face folders: found, checked, fused code by code, and computing what the reference packages do."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.checkpoint.checkpoint import Checkpoint
from jaxinfer.models.decoder import param_shapes
from jaxinfer.quant.array import QuantArray
from jaxinfer.quant.layouts.awq import AWQLayout
from jaxinfer.quant.layouts.bitsandbytes import BitsAndBytesLayout
from jaxinfer.quant.layouts.gptq import GPTQLayout
from jaxinfer.quant.layouts.layout import Layout
from jaxinfer.quant.plan import QuantPlan
from jaxinfer.quant.quantize import dequantized, quantize
from jaxinfer.quant.storage import Storage
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.quantization import QuantOptions, named_method, quant_plan

DATA = Path(__file__).parents[1] / "data/quantised"
Q_PROJ = "model.layers.0.self_attn.q_proj"


def plan_of(checkpoint: Checkpoint, method: str | None = None, platform: str = "cpu", **options: Any) -> QuantPlan:
    chosen = QuantOptions(**({"fast_form": False} | options))
    plan = quant_plan(named_method(method), chosen, checkpoint.model_config, checkpoint, platform)
    assert plan is not None
    return plan


def leaves(tree: Any) -> dict[str, Any]:
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: isinstance(leaf, QuantArray))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in found}


def values(leaf: Any) -> np.ndarray:
    """On the host, in floats."""
    return dequantized(jax.tree.map(np.asarray, leaf)) if isinstance(leaf, QuantArray) else np.asarray(leaf)


@pytest.fixture
def copy(tmp_path: Path) -> Callable[..., Path]:
    """`copy(name, edit, **quantization_config)`: that folder again; `edit` changes tensors in place."""

    def make(name: str, edit: Callable[[dict[str, np.ndarray]], Any] = lambda tensors: None, **changes: Any) -> Path:
        config = json.loads((DATA / name / "config.json").read_text())
        config["quantization_config"].update(changes)
        tensors = load_file(DATA / name / "model.safetensors")
        edit(tensors)
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return make


@pytest.mark.parametrize(
    ("name", "text", "floats"),
    [
        ("awq_gemm", "awq, 4 bits in groups of 32", ["layers_1/mlp/down/kernel"]),
        ("awq_row", "awq, 4 bits per output channel", []),
        ("gptq_v1", "gptq, 4 bits in groups of 32", []),
        ("gptq_v2_8bit", "gptq, 8 bits in groups of 32, asymmetric, act-order", []),
    ],
)
def test_logits_are_those_of_the_reference_package(
    name: str, text: str, floats: list[str], all_logits: Callable[..., np.ndarray]
) -> None:
    """AWQ with a module that is not converted (field case 7f) and with a tied head that is in the file, too (22)."""
    checkpoint, reference = open_checkpoint(DATA / name), np.load(DATA / name / "reference.npz")
    assert str(checkpoint.layout) == text and checkpoint.dtype == "float16"
    plan = plan_of(checkpoint)
    params = load_params(checkpoint, "float32", plan=plan)
    matrices = {path for path in leaves(params) if path.startswith("layers_") and path.endswith("kernel")}
    assert matrices - plan.kept.keys() == set(floats)
    described = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    shapes = param_shapes(checkpoint.model_config, "float32", plan)
    assert described == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), shapes)
    found = all_logits(checkpoint.model_config, params, reference["tokens"])
    np.testing.assert_allclose(found, reference["logits"], atol=1e-4)


def test_parts_with_orders_of_their_own_become_floats(all_logits: Callable[..., np.ndarray]) -> None:
    """In this checkpoint layer 0's q, k and v have one act-order, as tools make it, and layer 1's have three."""
    checkpoint, reference = open_checkpoint(DATA / "gptq_act_order"), np.load(DATA / "gptq_act_order/reference.npz")
    with pytest.warns(UserWarning, match=r"2 parameters, 'layers_1/attn/qkv/kernel' among them, .* kept in floats"):
        plan = plan_of(checkpoint)
    params = load_params(checkpoint, "float32", plan=plan)
    quantised = {path for path, leaf in leaves(params).items() if isinstance(leaf, QuantArray)}
    mixed = {"layers_1/attn/qkv/kernel", "layers_1/mlp/gate_up/kernel"}
    kinds = {"attn/qkv", "attn/out", "mlp/gate_up", "mlp/down"}
    assert quantised == {f"layers_{layer}/{kind}/kernel" for layer in (0, 1) for kind in kinds} - mixed
    assert all(leaves(params)[path].order is not None for path in quantised)
    found = all_logits(checkpoint.model_config, params, reference["tokens"])
    np.testing.assert_allclose(found, reference["logits"], atol=1e-4)


def test_without_a_plan_the_values_are_read_in_floats() -> None:
    checkpoint = open_checkpoint(DATA / "gptq_v2_8bit")
    stored = leaves(load_params(checkpoint, "float32", plan=plan_of(checkpoint)))
    floats = leaves(load_params(checkpoint, "float32"))
    for path, leaf in floats.items():
        np.testing.assert_array_equal(values(stored[path]), leaf)


def test_the_fast_form_is_made_from_the_codes() -> None:
    """What a CPU gets unless told otherwise."""
    checkpoint = open_checkpoint(DATA / "awq_gemm")
    plan = plan_of(checkpoint, fast_form=None)
    assert plan.fast_form and not plan_of(checkpoint, platform="gpu", fast_form=None).fast_form
    stored, floats = (leaves(load_params(checkpoint, "float32", plan=each)) for each in (plan, None))
    for path in plan.kept:
        array = jax.tree.map(np.asarray, stored[path])
        assert array.codes.dtype == np.int8 and array.group == array.row
        error = np.abs(dequantized(array) - floats[path]).reshape(array.channels, -1)
        assert (error <= array.scale.reshape(array.channels, 1) * 0.5001).all()


def test_whole_rows_count_as_per_channel() -> None:
    checkpoint = open_checkpoint(DATA / "awq_row")
    assert {str(storage) for storage in plan_of(checkpoint).kept.values()} == {"int4 per output channel, asymmetric"}


def test_head_and_embedding_can_be_rounded_beside() -> None:
    checkpoint = open_checkpoint(DATA / "awq_gemm")
    plan = plan_of(checkpoint, quantize_head=True, quantize_embedding=True)
    stored = leaves(load_params(checkpoint, "float32", plan=plan))
    assert stored["lm_head/kernel"].codes.dtype == stored["embed/embedding"].codes.dtype == np.int8
    assert not isinstance(stored["layers_1/mlp/down/kernel"], QuantArray)


def test_progress_adds_up_to_the_bytes_of_the_file() -> None:
    from jaxinfer.checkpoint.load import stored_bytes
    from jaxinfer.checkpoint.quantised import read_quantised

    checkpoint = open_checkpoint(DATA / "awq_gemm")
    counts: list[int] = []
    for _ in read_quantised(checkpoint, "float32", plan_of(checkpoint), on_bytes=counts.append):
        pass
    tensors = load_file(DATA / "awq_gemm/model.safetensors").values()
    assert sum(counts) == stored_bytes(checkpoint) == sum(tensor.nbytes for tensor in tensors)


# --- Fusion: every family's table, checked against floats that went the ordinary way.


def pack_linear(layout: Layout, value: np.ndarray, seed: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """A module's tensors, and the values that they stand for."""
    storage = Storage("int8") if layout is ROW else Storage("int8", 8, scales="float16")
    if isinstance(layout, AWQLayout) or (isinstance(layout, GPTQLayout) and layout.bits == 4):
        storage = Storage("int4", 8, symmetric=False, scales="float16")
    if not (isinstance(layout, GPTQLayout) and layout.act_order):
        array = quantize(value, 1, storage)
        return layout.pack(array), dequantized(array)
    order = np.random.default_rng(seed).permutation(value.shape[1]).astype(np.int32)
    array = quantize(value[:, order], 1, storage)
    back = dequantized(array)[:, np.argsort(order)]
    ordered = QuantArray(**{field: getattr(array, field) for field in array.__dataclass_fields__} | {"order": order})
    return layout.pack(ordered), back


AWQ, ROW, INT8 = AWQLayout(8), BitsAndBytesLayout("int8"), GPTQLayout(8, 8, act_order=True, symmetric=False)
# qkv and gate-up in one tensor; an interleaved qkv; experts with orders of their own; experts with a scale a row each,
# of the outputs that they share; a shared expert; rotary channels in pairs.
FUSED = [("phi3", AWQ), ("gpt_neox", AWQ), ("mixtral", INT8), ("mixtral", ROW), ("qwen2_moe", AWQ), ("cohere", AWQ)]


@pytest.mark.parametrize(("name", "layout"), FUSED, ids=[f"{name}-{layout.method}" for name, layout in FUSED])
@pytest.mark.filterwarnings("ignore:.*kept in floats")
def test_modules_are_fused_like_floats(name: str, layout: Layout, make_case: Callable[..., Any]) -> None:
    case = make_case(name)
    plain, packed = {}, {}
    for key, value in case.weights().items():
        module = key.removesuffix(".weight")
        linear = value.ndim == 2 and "embed" not in key and layout.covers(module) and value.shape[0] % 8 == 0
        if not linear:
            plain[key] = packed[key] = value
            continue
        tensors, plain[key] = pack_linear(layout, value, seed=sum(map(ord, key.partition(".w")[0])))
        packed |= {f"{module}.{suffix}": tensor for suffix, tensor in tensors.items()}
    folder = case.folder()
    floats = {}
    for tensors, config in ((plain, case.config), (packed, case.config | {"quantization_config": layout.config()})):
        save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(folder)
        if tensors is plain:
            floats = leaves(load_params(checkpoint, "float32"))
    plan = plan_of(checkpoint)
    stored = leaves(load_params(checkpoint, "float32", plan=plan))
    for path, leaf in floats.items():
        np.testing.assert_allclose(values(stored[path]), leaf, rtol=1e-6, atol=1e-6, err_msg=path)
    quantised = {path.partition("/")[2] for path, leaf in stored.items() if isinstance(leaf, QuantArray)}
    experts = {"mlp/down/kernel"} if layout is INT8 else {"mlp/down/kernel", "mlp/gate_up/kernel"}
    experts = {"mlp/down/kernel", "mlp/up/kernel"} if name == "gpt_neox" else experts
    assert quantised >= experts and any("qkv" in path for path in quantised) == (layout is not INT8)


def test_a_head_can_be_quantised(make_case: Callable[..., Any], all_logits: Callable[..., np.ndarray]) -> None:
    """GPTQ's lm_head: true. All that is packed is the head, with an order of its inputs."""
    case, layout = make_case("phi3"), GPTQLayout(4, 8, act_order=True, symmetric=False, head=True)
    weights = case.weights()
    tensors, values_of_head = pack_linear(layout, weights.pop("lm_head.weight"), seed=0)
    folder = case.folder(quantization_config=layout.config())
    save_file(
        weights | {f"lm_head.{suffix}": tensor for suffix, tensor in tensors.items()}, folder / "model.safetensors"
    )
    checkpoint = open_checkpoint(folder)
    plan = plan_of(checkpoint)
    assert set(plan.kept) == {"lm_head/kernel"} and plan.kept["lm_head/kernel"].ordered
    found = all_logits(checkpoint.model_config, load_params(checkpoint, "float32", plan=plan), case.tokens)
    params = load_params(checkpoint, "float32")
    np.testing.assert_array_equal(params["lm_head"]["kernel"], values_of_head)
    np.testing.assert_allclose(found, all_logits(checkpoint.model_config, params, case.tokens), atol=1e-4)


def test_memory_holds_the_codes_and_one_parameter(tmp_path: Path) -> None:
    """The largest parameter is 1 MB in floats and 0.2 MB in codes."""
    import tracemalloc

    from jaxinfer.checkpoint.quantised import read_quantised

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = json.loads((DATA / "awq_gemm/config.json").read_text()) | sizes | {"num_hidden_layers": 1, "head_dim": 64}
    shapes = {f"self_attn.{name}_proj": (256, 256) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256), "mlp.down_proj": (256, 512)}
    tensors = {
        f"model.layers.0.{module}.{suffix}": np.zeros(spec.shape, spec.dtype if suffix[0] == "q" else np.float16)
        for module, shape in shapes.items()
        for suffix, spec in AWQLayout(32).shapes(*shape).items()
    }
    tensors |= {f"model.layers.0.{name}_layernorm.weight": np.ones(256) for name in ("input", "post_attention")}
    tensors |= {"model.norm.weight": np.ones(256), "model.embed_tokens.weight": np.ones((64, 256))}
    tensors |= {"lm_head.weight": np.ones((64, 256))}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    plan = plan_of(checkpoint)
    tracemalloc.start()
    held = [
        (value, value.nbytes)
        for name, value in read_quantised(checkpoint, "float32", plan)
        if name.startswith("layers")
    ]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    largest = max(nbytes for _, nbytes in held)
    assert peak < sum(nbytes for _, nbytes in held) + 2 * largest


def test_matrices_that_are_stored_the_other_way_round_are_refused(make_case: Callable[..., Any]) -> None:
    folder = make_case("gpt2").folder(quantization_config=GPTQLayout().config())
    with pytest.raises(ValueError, match=r"quantised gpt2 checkpoints are not supported: their '.*' is \[in, out\]"):
        open_checkpoint(folder)


# --- What is refused, and how.


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{Q_PROJ}.scales"), r"model\.layers\.0\.self_attn\.q_proj\.scales \[2, 64\] missing"),
        (
            lambda t: t.update({f"{Q_PROJ}.qweight": t[f"{Q_PROJ}.qweight"][:, :4]}),
            r"q_proj\.qweight is int32\[64, 4\] but awq, 4 bits in groups of 32 of 64 x 64 says int32\[64, 8\]",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.scales": t[f"{Q_PROJ}.scales"].astype(np.float64)}),
            r"q_proj\.scales is float64\[2, 64\] but .* says float16 or bfloat16 or float32\[2, 64\]",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.qzeros": t[f"{Q_PROJ}.qzeros"].astype(np.int64)}),
            r"q_proj\.qzeros is int64",
        ),
        (lambda t: t.update({f"{Q_PROJ}.g_idx": np.zeros(64, np.int32)}), r"q_proj\.g_idx \[64\] has no place"),
        (
            lambda t: [t.pop(f"{Q_PROJ}.{suffix}") for suffix in ("qweight", "qzeros", "scales")],
            r"q_proj\.weight \[64, 64\] missing",
        ),
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight \[64\] missing"),
        (lambda t: t.pop("lm_head.weight"), r"lm_head\.weight \[64, 64\] missing"),
    ],
    ids=["missing", "shape", "dtype", "int64", "extra", "module", "norm", "head"],
)
def test_tensors_that_do_not_fit_are_named(
    edit: Callable[[dict[str, np.ndarray]], Any], message: str, copy: Callable[..., Path]
) -> None:
    with pytest.raises(ValueError, match=message):
        open_checkpoint(copy("awq_gemm", edit))


def test_biases_of_zeros_of_layers_that_have_none_are_left_out(copy: Callable[..., Path]) -> None:
    """AutoGPTQ wrote them until 2024 (its issue 555): TheBloke's checkpoints of Llama have one for each layer."""

    def edit(tensors: dict[str, np.ndarray], value: float = 0) -> None:
        for name in [name.removesuffix("qweight") for name in tensors if name.endswith(".qweight")]:
            tensors[f"{name}bias"] = np.full(tensors[f"{name}scales"].shape[1], value, np.float16)

    with pytest.warns(UserWarning, match="kept in floats"):
        assert plan_of(open_checkpoint(copy("gptq_act_order", edit))).kept
    with pytest.raises(ValueError, match=r"down_proj\.bias \[64\], .* has no place in the model"):
        open_checkpoint(copy("gptq_act_order", lambda tensors: edit(tensors, 0.5)))


def test_a_quantised_head_of_a_model_that_ties_it_is_refused(copy: Callable[..., Path]) -> None:
    """Field case 22: the head is the embedding; a float copy of it may be there, and is in this checkpoint."""

    def edit(tensors: dict[str, np.ndarray]) -> None:
        head = quantize(np.asarray(tensors.pop("lm_head.weight"), np.float32), 1, Storage("int4", symmetric=False))
        tensors |= {f"lm_head.{suffix}": tensor for suffix, tensor in AWQLayout(-1).pack(head).items()}

    with pytest.raises(ValueError, match=r"lm_head\.\w+ \[\d+, \d+\].* has no place in the model"):
        open_checkpoint(copy("awq_row", edit))


def test_values_that_are_impossible_name_module_and_tensor(copy: Callable[..., Path]) -> None:
    def edit(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{Q_PROJ}.scales"][0, 0] = np.nan

    checkpoint = open_checkpoint(copy("awq_gemm", edit))
    with pytest.raises(ValueError, match=r"quantised module 'model\.layers\.0\.self_attn\.q_proj': scales holds"):
        load_params(checkpoint, "float32", plan=plan_of(checkpoint))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "hqq"}, r"config\.json: .*quant_method='hqq', which is not supported: .* awq, gptq"),
        ({"quant_method": None}, "quant_method=None"),
        ({"version": "gemv"}, r"config\.json: .*version='gemv' \(supported: 'gemm'\)"),
        ({"group_size": 128}, r"module 'model\.layers\.0\.mlp\.down_proj': in_features=96 is no multiple"),
    ],
    ids=str,
)
def test_settings_that_are_not_supported_are_refused(
    changes: Mapping[str, Any], message: str, copy: Callable[..., Path]
) -> None:
    with pytest.raises(ValueError, match=message):
        open_checkpoint(copy("awq_gemm", **changes))


def test_gptq_is_never_read_as_awq(copy: Callable[..., Path]) -> None:
    """Field case 7d: the method is that of the config; what is asked for must agree with it."""
    checkpoint = open_checkpoint(DATA / "gptq_v2_8bit")
    assert plan_of(checkpoint, "gptq").method == plan_of(checkpoint, "gptq_marlin").method == "gptq"
    for other in ("awq", "awq_marlin", "int8", "fp8"):
        name = named_method(other)
        with pytest.raises(ValueError, match=rf"quantization='{name}' .*but .* is quantised as gptq, 8 bits"):
            plan_of(checkpoint, other)
    with pytest.raises(ValueError, match=r"down_proj\.qweight is int32\[12, 64\] but awq"):
        open_checkpoint(copy("gptq_v1", quant_method="awq", version="gemm"))


def test_options_alone_are_those_of_the_checkpoints_method(data_dir: Path) -> None:
    args = EngineArgs("m", quantization_config={"fast_form": False})
    assert args.quantization is None
    for name, method in (("awq_gemm", "awq"), ("fp8_block", "fp8"), ("bnb_nf4", "bitsandbytes")):
        checkpoint = open_checkpoint(DATA / name)
        plan = quant_plan(None, args.quant_options, checkpoint.model_config, checkpoint, "cpu")
        assert plan is not None and plan.method == method and not plan.fast_form
    with pytest.raises(ValueError, match=r"quantization_config without quantization: \{'fast_form': False\} needs"):
        plan_of(open_checkpoint(data_dir / "tiny_llama"))


def test_what_transformers_calls_it_is_named(data_dir: Path) -> None:
    checkpoint = open_checkpoint(DATA / "awq_gemm")
    for asked, name in (({"load_in_8bit": True}, "load_in_8bit"), ({"load_in_4bit": True}, "load_in_4bit")):
        args = EngineArgs("m", **asked)
        with pytest.raises(ValueError, match=rf"\(or transformers' {name}=True\) was asked for, but .*awq_gemm is"):
            plan_of(checkpoint, args.quantization)


def test_methods_of_checkpoints_need_one(data_dir: Path) -> None:
    checkpoint = open_checkpoint(data_dir / "tiny_llama")
    for method in ("awq", "gptq", "compressed-tensors", "bitsandbytes"):
        with pytest.raises(ValueError, match=rf"quantization='{method}', but .*tiny_llama is not .*jaxinfer quantize"):
            plan_of(checkpoint, method)
    with pytest.raises(ValueError, match="quantization='awq', but live parameters are not quantised"):
        quant_plan("awq", QuantOptions(), checkpoint.model_config, None, "cpu")


def test_a_config_that_says_quantised_of_floats_is_refused(hf_copy: Callable[..., Path]) -> None:
    folder = hf_copy("tiny_llama", quantization_config=AWQLayout(32).config())
    with pytest.raises(ValueError, match="but no matrix is stored in that way; if all are floats, take"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("name", "file", "said", "layout"),
    [
        (
            "awq_gemm",
            "quant_config.json",
            {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"},
            AWQLayout(32),
        ),
        (
            "gptq_v1",
            "quantize_config.json",
            {"bits": 4, "group_size": 32, "desc_act": False, "sym": True},
            GPTQLayout(4, 32),
        ),
    ],
)
def test_settings_in_a_file_of_their_own(
    name: str, file: str, said: dict[str, Any], layout: Layout, copy: Callable[..., Path]
) -> None:
    """A module that is not converted is told by its float weight, which is there."""
    folder = copy(name)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).write_text(json.dumps(said))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.layout == layout
    kept = {path for path in plan_of(checkpoint).kept if "down" in path}
    assert kept == {"layers_0/mlp/down/kernel"}
    (folder / file).write_text(json.dumps(said | {"bits": 3, "w_bit": 3}))
    with pytest.raises(ValueError, match=rf"{file}: quantization_config of \w+ is not supported: bits=3"):
        open_checkpoint(folder)


def test_what_the_files_hold_counts_more_than_names(copy: Callable[..., Path]) -> None:
    """Tools match `modules_to_not_convert` in several ways; "gate" is a part of gate_proj's name."""
    checkpoint = open_checkpoint(copy("awq_gemm", modules_to_not_convert=["gate", "q_proj"]))
    assert plan_of(checkpoint).kept == plan_of(open_checkpoint(DATA / "awq_gemm")).kept


def test_codes_are_read_although_the_config_names_other_modules(copy: Callable[..., Path]) -> None:
    """As of text models whose names are longer in the file of a wrapper, with images."""
    group = json.loads((DATA / "ct_w8a8/config.json").read_text())["quantization_config"]["config_groups"]["group_0"]
    targets = {"targets": [r"re:.*language_model\.layers.*"]}
    checkpoint = open_checkpoint(copy("ct_w8a8", config_groups={"group_0": group | targets}))
    assert plan_of(checkpoint).kept == plan_of(open_checkpoint(DATA / "ct_w8a8")).kept


def test_a_copy_in_floats_says_nothing_of_quantisation(tmp_path: Path) -> None:
    from jaxinfer.checkpoint.convert import convert_checkpoint

    with pytest.warns(UserWarning, match="no tokenizer is written"):
        convert_checkpoint(
            DATA / "awq_gemm", tmp_path / "floats", format="safetensors", dtype="float32", progress=False
        )
    copied = open_checkpoint(tmp_path / "floats")
    assert copied.layout is None and copied.dtype == "float32"
    floats = leaves(load_params(open_checkpoint(DATA / "awq_gemm"), "float32"))
    for path, leaf in leaves(load_params(copied, "float32")).items():
        np.testing.assert_array_equal(leaf, floats[path])
