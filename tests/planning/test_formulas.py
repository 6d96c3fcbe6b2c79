"""Known values of the planner's formulas, and what must hold for all of them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.decoder import param_shapes
from jaxinfer.models.families.wrapper import text_config
from jaxinfer.models.registry import family_of_hf_config
from jaxinfer.planning import (
    PRESETS,
    count_parameters,
    kv_cache_size,
    kv_token_size,
    model_weight_size,
    sequence_blocks,
    weight_size,
)
from jaxinfer.planning.formulas import WEIGHT_FORMATS, weight_format
from jaxinfer.quant.storage import FORMATS
from jaxinfer.runner.compiled_plan import plan_of_format

GIB = 2**30
FAMILIES = sorted((Path(__file__).parents[1] / "data/families").glob("*.json"))
LLAMA_8B = PRESETS["llama-3-8b"]
few = st.integers(1, 64)


def test_cache_of_known_models() -> None:
    assert kv_cache_size(32, 32, 128, 8192) == 4 * GIB
    assert kv_cache_size(80, 64, 128, 4096) == 10_737_418_240
    assert kv_cache_size(32, 32, 128, 8192, num_kv_heads=8) == GIB
    assert kv_cache_size(32, 32, 128, 8192, num_kv_heads=1) == 4 * GIB // 32
    assert kv_cache_size(32, 32, 128, 8192, batch_size=3, dtype_size=1) == 6 * GIB
    assert kv_cache_size(32, 32, 128, 0) == 0


def test_codes_count_with_their_scales() -> None:
    """At head dim 128 a key of int8 takes 128 + 4 bytes, of int4 64 + 4, of bfloat16 256."""
    plain = kv_cache_size(32, 32, 128, 1, num_kv_heads=8)
    sizes = {dtype: kv_cache_size(32, 32, 128, 1, num_kv_heads=8, kv_dtype=dtype) for dtype in ("int8", "fp8", "int4")}
    assert sizes == {"int8": 2 * 32 * 8 * 132, "fp8": 2 * 32 * 8 * 132, "int4": 2 * 32 * 8 * 68}
    assert plain / sizes["int8"] > 1.9 and plain / sizes["int4"] > 3.6
    assert kv_token_size(LLAMA_8B, "int8") == sizes["int8"]
    assert kv_token_size(LLAMA_8B) == kv_token_size(LLAMA_8B, "bf16") == plain == 131_072
    assert kv_token_size(LLAMA_8B, "float32") == 2 * plain
    assert kv_token_size(LLAMA_8B, tp=4) == plain // 4


def test_blocks_of_sequences() -> None:
    assert sequence_blocks([100, 50, 200]) == (7, 4, 13)
    assert sequence_blocks([100, 50, 200], block_size=1) == (100, 50, 200)
    assert sequence_blocks([0, 16, 17], 16) == (0, 1, 2)
    assert sequence_blocks([]) == ()


def test_weights_by_format() -> None:
    assert weight_size(7e9) == weight_size(7e9, "fp16") == weight_size(7e9, "bfloat16") == 14_000_000_000
    assert weight_size(7e9, "int8") == weight_size(7e9, "fp8") == 7_000_000_000
    # Groups of 128 weights: 64 bytes of codes, a 16-bit scale, a zero point as a float of 32 or 16 bits.
    assert weight_size(128, "awq") == 70
    assert weight_size(128, "gptq") == weight_size(128, "int4") == 68
    assert weight_size(64, "nf4") == 36


def test_weights_of_a_model() -> None:
    """Llama-3-8B by hand: two tables of 128256 x 4096, and 65 norms of 4096, stay in 16 bits."""
    plain = 2 * (2 * 128256 * 4096 + 65 * 4096)
    matrices = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336)
    channels = 32 * (6144 + 4096 + 2 * 14336 + 4096)
    assert model_weight_size(LLAMA_8B) == plain + 2 * matrices == 2 * 8_030_261_248
    down = 32 * 4096 * 14336
    coarse = channels - 32 * 4096  # the down projections have groups of 64 instead
    assert model_weight_size(LLAMA_8B, "int8") == plain + matrices + 4 * coarse + 4 * down // 64
    assert model_weight_size(LLAMA_8B, "awq") == plain + matrices * (4 + 48 / 128) / 8
    assert model_weight_size(LLAMA_8B, "fp32") == 4 * 8_030_261_248
    assert model_weight_size(LLAMA_8B, tp=2) == 2 * (128256 * 4096 + 65 * 4096) + matrices


@pytest.mark.parametrize("path", FAMILIES, ids=lambda path: path.stem)
def test_parameters_are_those_of_the_module(path: Path) -> None:
    config = text_config(json.loads(path.read_text())["config"])
    model = family_of_hf_config(config).model_config(config)
    leaves = jax.tree_util.tree_leaves_with_path(param_shapes(model, "bfloat16"))
    count = count_parameters(model)
    assert count.total == sum(leaf.size for _, leaf in leaves)
    names = {jax.tree_util.keystr(place, simple=True, separator="/"): leaf for place, leaf in leaves}
    matrices = {name: leaf for name, leaf in names.items() if name.endswith(("out/kernel", "qkv/kernel"))}
    matrices |= {name: leaf for name, leaf in names.items() if name.endswith(("gate_up/kernel", "/up/kernel"))}
    matrices |= {name: leaf for name, leaf in names.items() if name.endswith("down/kernel")}
    assert count.linear == sum(leaf.size for leaf in matrices.values())
    assert count.down == sum(leaf.size for name, leaf in matrices.items() if name.endswith("down/kernel"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kv_cache_size(0, 1, 1, 1), "num_layers=0"),
        (lambda: kv_cache_size(1, 6, 1, 1, num_kv_heads=4), "num_kv_heads=4 must divide num_heads=6"),
        (lambda: kv_cache_size(1, 1, 1, -1), "seq_len=-1"),
        (lambda: kv_cache_size(1, 1, 1, 1, dtype_size=0), "dtype_size=0"),
        (lambda: kv_cache_size(1, 1, 2, 1, kv_dtype="int3"), "kv_cache_dtype='int3'"),
        (lambda: sequence_blocks([3, -1]), "seq_lens has -1"),
        (lambda: sequence_blocks([3], 0), "block_size=0"),
        (lambda: weight_size(-1), "num_params=-1"),
        (lambda: weight_size(7e9, "awk"), "quant='awk' is not known; use one of"),
    ],
)
def test_bad_numbers_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_counts_are_ints() -> None:
    with pytest.raises(TypeError, match="seq_len=10.0"):
        kv_cache_size(1, 1, 1, 10.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batch_size=True"):
        kv_cache_size(1, 1, 1, 1, True)


@given(few, st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4]), st.integers(0, 10**6), few)
@settings(max_examples=50, deadline=None)
def test_cache_is_a_product(layers: int, kv_heads: int, groups: int, tokens: int, batch: int) -> None:
    heads = kv_heads * groups
    size = kv_cache_size(layers, heads, 64, tokens, batch, num_kv_heads=kv_heads)
    assert size == sum(2 * kv_heads * 64 * 2 * tokens for _ in range(layers)) * batch
    assert size * groups == kv_cache_size(layers, heads, 64, tokens, batch)
    assert size <= kv_cache_size(layers, heads, 64, tokens + 1, batch, num_kv_heads=kv_heads)
    model = ModelConfig(8, 64 * heads, 8, layers, heads, kv_heads, head_dim=64)
    assert kv_token_size(model) * tokens * batch == size


@given(st.lists(st.integers(0, 5000), max_size=20), few)
@settings(max_examples=50, deadline=None)
def test_blocks_hold_their_sequence_and_no_more(lengths: list[int], block_size: int) -> None:
    for length, blocks in zip(lengths, sequence_blocks(lengths, block_size), strict=True):
        assert blocks * block_size >= length > (blocks - 1) * block_size or blocks == length == 0


@pytest.mark.parametrize("quant", WEIGHT_FORMATS)
def test_weights_shrink_with_devices(quant: str) -> None:
    sizes = [model_weight_size(LLAMA_8B, quant, tp) for tp in (1, 2, 4, 8)]
    tables = 4 if quant == "fp32" else 2
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] > tables * 2 * 128256 * 4096 / 8  # embedding and head are split like the layers
    assert 0 <= 8 * sizes[-1] - sizes[0] <= 8 * tables * 65 * 4096  # norms lie whole on each
    assert weight_format(quant)[0] == quant
    deeper = replace(LLAMA_8B, num_hidden_layers=33)
    assert model_weight_size(deeper, quant) > sizes[0]


def test_planning_starts_no_backend_and_formulas_need_no_jax() -> None:
    program = (
        "import sys, jaxinfer.planning as p\n"
        "assert 'numpy' not in sys.modules, 'lazy'\n"
        "p.recommend_config('h200', 7, 8); p.kv_cache_size(1, 1, 1, 1); p.PRESETS; p.find_gpu('l4')\n"
        "p.recommend_config('h200', 'llama-3-8b', 8)\n"
        "print('jax' in sys.modules, set(p.__all__) <= set(dir(p)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        import jaxinfer.planning

        _ = jaxinfer.planning.nothing


@pytest.mark.parametrize("name", ["qwen2.5-7b", "mixtral-8x7b"])
@pytest.mark.parametrize("method", ["int8", "fp8"])
def test_a_model_s_bytes_are_the_engine_s(name: str, method: str) -> None:
    model = replace(PRESETS[name], num_hidden_layers=1)
    tree = jax.tree.leaves(param_shapes(model, "bfloat16", plan_of_format(method, model)))
    assert model_weight_size(model, method) == sum(leaf.size * leaf.dtype.itemsize for leaf in tree)


@pytest.mark.parametrize("method", ["int8", "int8_w8a8", "fp8", "int4", "nf4"])
def test_bytes_are_those_of_the_engines_formats(method: str) -> None:
    storage = FORMATS[method]  # type: ignore[index]
    kind = WEIGHT_FORMATS[method]
    bits = 4096 * 11008 * kind.bits + 11008 * kind.channel_bits  # of one that does not come last in its layer
    assert storage.nbytes(11008, 4096) == pytest.approx(bits / 8, abs=64)  # NF4's table
