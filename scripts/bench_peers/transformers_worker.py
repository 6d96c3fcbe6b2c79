"""transformers on a Hugging Face directory: one static batch, or `generate_batch` as variant "continuous"."""

from __future__ import annotations

import torch  # type: ignore[import-not-found, unused-ignore]
import transformers  # type: ignore[import-not-found, unused-ignore]

from scripts.bench_peers.worker import LoadRequest, serve

PAGE_SIZE = 256  # the default


class TransformersEngine:
    def __init__(self, request: LoadRequest) -> None:
        torch.set_num_threads(request.threads)
        self._continuous = request.variant == "continuous"
        model = transformers.AutoModelForCausalLM.from_pretrained(request.model, dtype=torch.float32)
        self._model = model.eval()
        # By default every call fills most of the machine's memory with a fresh cache, at ten seconds a call.
        pages_a_request = -(-request.max_model_len // PAGE_SIZE)
        self._batching_config = transformers.ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=request.max_num_seqs * pages_a_request, max_batch_tokens=2048
        )
        # Without an EOS id it generates max_new_tokens; the prompts of a batch have one length, so nothing is padded.
        self._model.generation_config.eos_token_id = None

    def facts(self) -> dict[str, str]:
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": "float32",
            "mode": "continuous batching" if self._continuous else "static batch",
            "attention": str(self._model.config._attn_implementation),
            "threads": str(torch.get_num_threads()),
        }

    @torch.inference_mode()
    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        if self._continuous:
            return self._generate_continuous(prompts, max_tokens)
        input_ids = torch.tensor(prompts)
        output_ids = self._model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
        return [ids[len(prompt) :].tolist() for prompt, ids in zip(prompts, output_ids, strict=True)]

    def _generate_continuous(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=-1, pad_token_id=0, use_cuda_graph=False
        )
        outputs = self._model.generate_batch(
            inputs=prompts, generation_config=config, continuous_batching_config=self._batching_config
        )
        return [list(output.generated_tokens) for output in outputs.values()]


if __name__ == "__main__":
    serve(TransformersEngine)
