"""Beam search on SmolLM2-135M-Instruct against transformers' in float32: the same sequences and scores."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, BeamSearchOutput, BeamSearchParams

pytestmark = pytest.mark.real_model

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "beam_search_smollm2.json").read_text())
CASES = REFERENCE["cases"]
ENDS = REFERENCE["eos_token_ids"]


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(
        smollm2_path,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=8,
        max_logprobs=4,  # so that only the narrowest search finds what it needs in the step's own copy
        num_gpu_blocks_override=60,
        enforce_eager=True,
        use_tqdm_on_load=False,
    ) as engine:
        yield engine


def params(case: Mapping[str, Any], **changed: Any) -> BeamSearchParams:
    names = ("beam_width", "max_tokens", "length_penalty", "ignore_eos")
    arguments = {name: case[name] for name in names if name in case}
    return BeamSearchParams(**{"include_stop_str_in_output": True} | arguments | changed)


def check(output: BeamSearchOutput, case: Mapping[str, Any], prompt_ids: list[int]) -> None:
    """Ids as transformers has them, and its scores from the sums; every sequence begins with the prompt."""
    beams = [sequence.tokens[len(prompt_ids) :] for sequence in output.sequences]
    assert beams == case["beams"]
    scores = [
        sequence.cum_logprob / len(beam) ** case["length_penalty"]
        for sequence, beam in zip(output.sequences, beams, strict=True)
    ]
    assert scores == pytest.approx(case["scores"], abs=1e-3, rel=1e-4)
    for sequence, beam in zip(output.sequences, beams, strict=True):
        assert sequence.tokens[: len(prompt_ids)] == prompt_ids
        chosen = [entry[token].logprob for entry, token in zip(sequence.logprobs, beam, strict=True)]
        assert sum(chosen) == pytest.approx(sequence.cum_logprob)
        ended = beam[-1] in ENDS and not case.get("ignore_eos")
        assert sequence.finish_reason == ("stop" if ended else "length")


def name(case: Mapping[str, Any]) -> str:
    return f"{case['prompt']}-{case['beam_width']}-{case['length_penalty']:g}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_equals_transformers(llm: LLM, golden: Mapping[str, Any], case: Mapping[str, Any]) -> None:
    prompt = next(entry for entry in golden["prompts"] if entry["name"] == case["prompt"])
    (output,) = llm.beam_search({"prompt_token_ids": prompt["prompt_ids"]}, params(case))
    check(output, case, prompt["prompt_ids"])
