"""EAGLE heads in files of the published layouts, through `LLM`: the model says its script whatever the heads guess, and
heads that know the script make it say several tokens a step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxinfer import LLM, SamplingParams
from jaxinfer.startup import loading

SCRIPT = [*range(40, 80), 40]
SIZE, VOCAB = 64, 258
SIZES = {
    "max_num_seqs": 1, "max_num_batched_tokens": 24, "num_gpu_blocks_override": 50, "max_model_len": 96,
    "use_tqdm_on_load": False, "skip_tokenizer_init": True, "block_size": 8, "enforce_eager": True,
}  # fmt: skip


def layer(inputs: int, zero: bool, names: str) -> dict[str, np.ndarray]:
    """A Llama layer by its names in checkpoints, random or adding nothing."""
    shapes = {
        "self_attn.q_proj": (SIZE, inputs), "self_attn.k_proj": (SIZE, inputs), "self_attn.v_proj": (SIZE, inputs),
        "self_attn.o_proj": (SIZE, SIZE), "mlp.gate_proj": (8, SIZE), "mlp.up_proj": (8, SIZE),
        "mlp.down_proj": (SIZE, 8),
    }  # fmt: skip
    rng = np.random.default_rng(0)
    made = {name: (0.0 if zero else 0.1) * rng.standard_normal(shape) for name, shape in shapes.items()}
    made["post_attention_layernorm"] = np.ones(SIZE)
    return {f"{names}.{name}.weight": values.astype(np.float32) for name, values in made.items()}


def eagle(signs: np.ndarray, right: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Version 1: the guessed feature is the token's embedding, from which the model's head knows what follows."""
    tensors = layer(SIZE, right, "layers.0")
    matrix = np.hstack([np.eye(SIZE), np.zeros((SIZE, SIZE))]) if right else np.random.randn(SIZE, 2 * SIZE)
    tensors |= {"fc.weight": matrix.astype(np.float32), "embed_tokens.weight": signs}
    return {"architectures": ["LlamaForCausalLM"], "bias": False}, tensors


def eagle3(signs: np.ndarray, right: bool) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The feature is the embedding of the token before. The likeliest guess is the token two behind that, then the next
    ones: of a tree in which features do not move on, one path holds, and that is not the first one."""
    ids = np.arange(30, 100)
    tensors = layer(2 * SIZE, right, "midlayer")
    tensors["fc.weight"] = np.hstack([np.eye(SIZE), np.zeros((SIZE, 2 * SIZE))]).astype(np.float32)
    for name in ("midlayer.hidden_norm.weight", "midlayer.input_layernorm.weight", "norm.weight"):
        tensors[name] = np.ones(SIZE, np.float32)
    rows = {token: index for index, token in enumerate(ids)}
    logits = np.zeros((len(ids), 40))
    for place in range(40):
        for behind, value in ((2, 3.0), (3, 2.0), (4, 1.0)):
            logits[rows[40 + (place + behind) % 40], place] = value
    head = logits @ np.linalg.pinv(signs[40:80].T)
    tensors |= {"lm_head.weight": head.astype(np.float32), "d2t": ids - np.arange(len(ids))}
    tensors["t2d"] = np.isin(np.arange(VOCAB), ids)
    return {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(ids)}, tensors


KINDS = {"eagle": eagle, "eagle3": eagle3}
TREE = {"num_speculative_tokens": 21, "eagle_topk": 3, "eagle_depth": 3}
CASES = {
    "cut eagle of a quantised model": (
        "eagle",
        {"num_speculative_tokens": 5, "draft_vocab": [*range(30, 90)]},
        {"quantization": "int8", "kv_cache_dtype": "int8"},
    ),
    "eagle3": ("eagle3", TREE, {}),
}


@pytest.fixture
def written(
    tmp_path: Path, scripted_model: Callable[..., Any], write_checkpoint: Callable[..., Path]
) -> Callable[..., tuple[Path, Path]]:
    def write(kind: str, right: bool = True) -> tuple[Path, Path]:
        model, params = scripted_model(SCRIPT, VOCAB)
        signs = params["embed"]["embedding"]
        said, tensors = KINDS[kind](signs, right)
        folder = tmp_path / "head"
        folder.mkdir()
        sizes = {
            "hidden_size": SIZE, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
            "vocab_size": VOCAB, "max_position_embeddings": 512, "model_type": "llama",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps({**sizes, **said}))
        save_file(tensors, folder / "model.safetensors")
        return write_checkpoint(model, params), folder

    return write


@pytest.mark.parametrize("case", CASES)
def test_a_head_that_is_right(written: Callable[..., tuple[Path, Path]], case: str) -> None:
    kind, options, engine = CASES[case]
    model, head = written(kind)
    llm = LLM(str(model), speculative_config={"method": kind, "model": str(head), **options}, **SIZES, **engine)
    prompt = {"prompt_token_ids": [*range(40, 53)]}
    params = SamplingParams(temperature=0, max_tokens=31, ignore_eos=True)
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    assert output.outputs[0].token_ids == [40 + (13 + step) % 40 for step in range(31)]
    length = llm.stats().speculation.acceptance_length
    assert length > 5.0 if kind == "eagle" else 3.5 < length <= 4.0


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("eagle3", {"method": "eagle"}, "of the speculative method 'eagle3', not 'eagle'"),
        ("eagle", {"method": "eagle3"}, "of the speculative method 'eagle', not 'eagle3'"),
        (
            "eagle",
            {"method": "eagle", "draft_vocab": [3, 258]},
            r"draft_vocab=\[3, 258\]: it must be ids from 0 to below 258",
        ),
        ("eagle3", {"method": "eagle3", "draft_vocab": 30}, "draft_vocab is not of"),
        ("eagle", {"method": "eagle", "draft_vocab": 0}, "draft_vocab=0: it must be ids from 0"),
        ("eagle", {"method": "eagle", "draft_vocab": True}, "draft_vocab=True: .*it must be ids from 0"),
        ("eagle", {"method": "eagle", "draft_vocab": 10**15}, "draft_vocab=1000000000000000: it must be ids from 0"),
        ("eagle", {"method": "eagle", "draft_vocab": "nowhere.json"}, "draft_vocab='nowhere.json': .*it must be ids"),
        ("eagle", {"method": "eagle", "draft_vocab": [[1], [2, 3]]}, r"draft_vocab=\[\[1\], \[2, 3\]\]: .*it must be"),
        ("eagle", {"method": "eagle", "eagle_topk": 0}, "eagle_topk=0"),
    ],
)
def test_what_does_not_fit_is_refused(
    written: Callable[..., tuple[Path, Path]], kind: str, options: dict[str, Any], message: str
) -> None:
    model, head = written(kind)
    with pytest.raises(ValueError, match=message):
        LLM(str(model), speculative_config={"model": str(head), **options}, **SIZES)


def test_a_head_of_another_model_is_refused(written: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    model, head = written("eagle")
    said = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps({**said, "vocab_size": 300}))
    with pytest.raises(ValueError, match="its vocab_size is 300 and the model's is 258"):
        LLM(str(model), speculative_config={"method": "eagle", "model": str(head)}, **SIZES)


@pytest.mark.parametrize(("kind", "name"), [("eagle", "layers.0.mlp.up_proj.weight"), ("eagle3", "norm.weight")])
def test_a_head_without_a_tensor_is_refused_before_the_model_is_read(
    written: Callable[..., tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    model, head = written(kind)
    tensors = load_file(head / "model.safetensors")
    del tensors[name]
    save_file(tensors, head / "model.safetensors")
    monkeypatch.setattr(loading, "load_params", lambda *_, **__: pytest.fail("the model's weights are read"))
    with pytest.raises(ValueError, match=f"{name}.* is missing"):
        LLM(str(model), speculative_config={"method": kind, "model": str(head)}, **SIZES)
