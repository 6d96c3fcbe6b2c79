"""jaxinfer, through its offline front door; the variant is its `quantization`."""

from __future__ import annotations

import importlib.metadata

from jaxinfer import LLM, SamplingParams
from scripts.bench_peers.worker import LoadRequest, serve


class JaxinferEngine:
    def __init__(self, request: LoadRequest) -> None:
        self._weights = request.variant or "float32"
        self._llm = LLM(
            model=request.model,
            dtype="float32",
            quantization=request.variant or None,
            max_model_len=request.max_model_len,
            max_num_seqs=request.max_num_seqs,
            max_num_batched_tokens=max(2048, request.max_num_seqs),  # as vLLM's offline default: prompts are not cut up
            enable_prefix_caching=False,  # the same prompts come again in every round
        )

    def facts(self) -> dict[str, str]:
        versions = {name: importlib.metadata.version(name) for name in ("jaxinfer", "jax", "jaxlib")}
        return versions | {"dtype": "float32", "weights": self._weights, "threads": "all (XLA)"}

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(JaxinferEngine)
