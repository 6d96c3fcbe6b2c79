"""The real model, read from its Q4_1 GGUF file (9 query heads on 3 KV heads, Q8_0 embedding, no output tensor)."""

import numpy as np
import pytest

from jaxinfer.checkpoint import load_params, open_checkpoint
from jaxinfer.models.config import ModelConfig

pytestmark = pytest.mark.real_model


def test_config(smollm2_path):
    checkpoint = open_checkpoint(smollm2_path)
    expected = ModelConfig(
        49152, 576, 1536, 30, 9, 3, 64, 8192, 100000.0, rms_norm_eps=np.float32(1e-5), tie_word_embeddings=True
    )
    assert checkpoint.model_config == expected
    assert checkpoint.eos_token_ids == {0, 2}  # <|endoftext|> is told by its spelling, as llama.cpp does


def test_tokenizer(smollm2_path, golden):
    tokenizer = open_checkpoint(smollm2_path).tokenizer()
    assert tokenizer.encode("The capital of France is") == golden["prompts"][0]["prompt_ids"]
    assert tokenizer.chat_template == golden["chat_template"]


def test_first_step_logits_of_the_short_prompts(smollm2_path, golden, all_logits):
    checkpoint = open_checkpoint(smollm2_path)
    params = load_params(checkpoint, "float32")
    prompts = [prompt for prompt in golden["prompts"] if len(prompt["prompt_ids"]) <= 64]
    assert len(prompts) == 11
    for prompt in prompts:
        ids = prompt["prompt_ids"]
        padded = ids + [0] * (64 - len(ids))  # one length, one compilation; causal rows do not see what follows
        logits = all_logits(checkpoint.model_config, params, padded)[len(ids) - 1]
        best = prompt["first_step_top"]
        np.testing.assert_allclose(logits[[entry["id"] for entry in best]], [e["logit"] for e in best], atol=1e-3)
        assert logits.argmax() == prompt["greedy_ids"][0]
