"""The real model, converted from its GGUF file: the same greedy ids as transformers, in either format."""

import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.checkpoint.convert import convert_checkpoint
from jaxinfer.checkpoint.leaf_shapes import flat

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

NUM_TOKENS = 24
ENGINE = {"dtype": "float32", "max_model_len": 128, "enforce_eager": True, "use_tqdm_on_load": False}


def test_greedy_ids_and_tokens_are_the_references(smollm2_path, golden, tmp_path):
    convert_checkpoint(smollm2_path, tmp_path / "out", "safetensors", dtype="float32", max_shard_bytes=200 << 20)
    prompts = [prompt for prompt in golden["prompts"] if len(prompt["prompt_ids"]) <= 64]
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(tmp_path / "out", max_num_seqs=12, num_gpu_blocks_override=128, **ENGINE) as llm:
        given = [{"prompt_token_ids": prompt["prompt_ids"]} for prompt in prompts]
        outputs = llm.generate(given, greedy, use_tqdm=False)
        got = {prompt["name"]: output.outputs[0].token_ids for prompt, output in zip(prompts, outputs, strict=True)}
        assert got == {prompt["name"]: prompt["greedy_ids"][:NUM_TOKENS] for prompt in prompts}
        check_tokenizer(llm.get_tokenizer(), golden)


def test_orbax_holds_the_same_bits(smollm2_path, golden, tmp_path):
    """So its ids are the others'."""
    convert_checkpoint(smollm2_path, tmp_path / "out", "orbax", dtype="float32", max_shard_bytes=200 << 20)
    converted, original = open_checkpoint(tmp_path / "out"), open_checkpoint(smollm2_path)
    assert converted.model_config == original.model_config
    expected = flat(load_params(original, "float32"))
    found = flat(load_params(converted, "float32"))
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        np.testing.assert_array_equal(found[path], values, err_msg=path)
    check_tokenizer(converted.tokenizer(), golden)


def check_tokenizer(tokenizer, golden):
    for prompt in golden["prompts"]:
        if prompt["messages"]:
            assert tokenizer.apply_chat_template(prompt["messages"]) == prompt["prompt_ids"]
        else:
            assert tokenizer.encode(prompt["text"]) == prompt["prompt_ids"]
    assert tokenizer.chat_template == golden["chat_template"]


def test_the_tokenizer_is_the_files(smollm2_path, tmp_path, data_dir):
    import json

    from jaxinfer.tokenizers.gguf_files import write_gguf_tokenizer
    from jaxinfer.tokenizers.load import load_tokenizer

    checkpoint = open_checkpoint(smollm2_path)
    write_gguf_tokenizer(checkpoint.metadata, tmp_path)
    original, written = checkpoint.tokenizer(), load_tokenizer(tmp_path)
    cases = json.loads((data_dir / "golden_tokenization.json").read_text())
    texts = [text for text in _strings(cases) if text]
    assert len(texts) > 50
    for text in texts:
        ids = original.encode(text)
        assert written.encode(text) == ids
        assert written.decode(ids) == original.decode(ids)
    assert written.all_special_ids == original.all_special_ids


def _strings(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _strings(item)
