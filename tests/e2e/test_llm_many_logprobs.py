"""More alternatives than a step packs into its one copy: they come from the logits, and are the same."""

from typing import Any

from jaxinfer import LLM, SamplingParams
from jaxinfer.models.config import ModelConfig
from jaxinfer.runner.programs import PACKED_LOGPROBS


def test_beyond_what_a_step_packs(text_config: ModelConfig, text_params: Any, small: dict[str, Any]) -> None:
    counts = [PACKED_LOGPROBS, PACKED_LOGPROBS + 10, -1]
    with LLM(model_config=text_config, params=text_params, max_logprobs=-1, **small) as llm:
        outputs = [
            llm.generate([5, 6], SamplingParams(temperature=0, max_tokens=1, logprobs=count), use_tqdm=False)[0]
            for count in counts
        ]
    packed, more, everything = (output.outputs[0].logprobs[0] for output in outputs)
    assert [len(entries) for entries in (packed, more, everything)] == [*counts[:2], text_config.vocab_size]
    ordered = sorted(everything, key=lambda token: everything[token].rank)
    assert list(packed) == ordered[: len(packed)]
    assert list(more) == ordered[: len(more)]
    for token, entry in packed.items():
        assert abs(entry.logprob - everything[token].logprob) < 1e-5
