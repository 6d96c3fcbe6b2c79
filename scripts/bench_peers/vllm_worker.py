"""vLLM (the CPU build) on a Hugging Face directory: variant "eager" or "compiled" by torch.compile."""

from __future__ import annotations

import importlib.metadata
import os

from scripts.bench_peers.worker import LoadRequest, serve


class VllmEngine:
    def __init__(self, request: LoadRequest) -> None:
        # Every usable core computes; vLLM would keep one free where there are enough.
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
        import vllm  # type: ignore[import-not-found, unused-ignore]

        self._mode = request.variant
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=request.model,
            dtype="float32",
            max_model_len=request.max_model_len,
            max_num_seqs=request.max_num_seqs,
            enforce_eager=request.variant != "compiled",
            enable_prefix_caching=False,  # no prompt comes twice: it could only cost
            skip_tokenizer_init=True,
        )

    def facts(self) -> dict[str, str]:
        import torch  # type: ignore[import-not-found, unused-ignore]

        distribution = next(name for name in ("vllm-cpu", "vllm") if _installed(name))
        return {
            distribution: importlib.metadata.version(distribution),
            "torch": torch.__version__,
            "dtype": "float32",
            "mode": self._mode,
            "threads bound to cores": os.environ["VLLM_CPU_OMP_THREADS_BIND"],
        }

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        requests = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    serve(VllmEngine)
