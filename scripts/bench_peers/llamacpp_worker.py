"""llama.cpp on a GGUF file through the C API of llama-cpp-python: one llama_decode advances every sequence by a token.

Each sequence has a KV stream of its own, which llama.cpp recommends where sequences share no prefix. The cache is
float32 like everybody's here; variant "f16-kv" is llama.cpp's default.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from typing import Any

import llama_cpp  # type: ignore[import-not-found, unused-ignore]
import numpy as np

from scripts.bench_peers.worker import LoadRequest, serve

MAX_TOKENS_PER_DECODE = 2048  # llama.cpp's default n_batch


class LlamaCppEngine:
    def __init__(self, request: LoadRequest) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            request.model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {request.model!r}: give it a GGUF file")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._variant = request.variant
        self._threads = request.threads
        self._context = llama_cpp.llama_init_from_model(self._model, self._context_params(request))
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context of that size: lower --max-model-len")
        self._batch = llama_cpp.llama_batch_init(MAX_TOKENS_PER_DECODE, 0, 1)

    def _context_params(self, request: LoadRequest) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = request.max_num_seqs * -(-request.max_model_len // 256) * 256  # a stream is padded to 256
        params.n_batch = MAX_TOKENS_PER_DECODE
        params.n_seq_max = request.max_num_seqs
        params.n_threads = params.n_threads_batch = request.threads
        params.kv_unified = False
        if request.variant != "f16-kv":
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
        return params

    def facts(self) -> dict[str, str]:
        description = ctypes.create_string_buffer(256)
        llama_cpp.llama_model_desc(self._model, description, len(description))
        return {
            "llama-cpp-python": importlib.metadata.version("llama-cpp-python"),
            "model": description.value.decode(),
            "kv cache": "float16" if self._variant == "f16-kv" else "float32",
            "kv streams": "one a sequence",
            "threads": str(self._threads),
            "build": llama_cpp.llama_print_system_info().decode().strip(),
        }

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), False)
        outputs = [[token_id] for token_id in self._prefill(prompts)]
        for step in range(max_tokens - 1):
            rows = [(ids[-1], len(prompt) + step) for prompt, ids in zip(prompts, outputs, strict=True)]
            for sequence, (token_id, position) in enumerate(rows):
                self._set(sequence, token_id, position, sequence, wants_logits=True)
            self._decode(len(rows))
            for sequence, ids in enumerate(outputs):
                ids.append(self._argmax(sequence))
        return outputs

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """First output id of every prompt. Whole prompts share a decode call as far as they fit."""
        first_ids: list[int] = []
        sequence = 0
        while sequence < len(prompts):
            used, last_rows = 0, []
            while sequence < len(prompts) and used + len(prompts[sequence]) <= MAX_TOKENS_PER_DECODE:
                prompt = prompts[sequence]
                for position, token_id in enumerate(prompt):
                    self._set(used + position, token_id, position, sequence, position == len(prompt) - 1)
                used += len(prompt)
                last_rows.append(used - 1)
                sequence += 1
            if not last_rows:
                raise ValueError(f"a prompt of {len(prompts[sequence])} tokens: at most {MAX_TOKENS_PER_DECODE} here")
            self._decode(used)
            first_ids += [self._argmax(row) for row in last_rows]
        return first_ids

    def _set(self, row: int, token_id: int, position: int, sequence: int, wants_logits: bool) -> None:
        batch = self._batch
        batch.token[row] = token_id
        batch.pos[row] = position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = sequence
        batch.logits[row] = wants_logits

    def _decode(self, num_rows: int) -> None:
        self._batch.n_tokens = num_rows
        status = llama_cpp.llama_decode(self._context, self._batch)
        if status != 0:
            raise RuntimeError(f"llama_decode returned {status} for {num_rows} tokens")

    def _argmax(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())


if __name__ == "__main__":
    serve(LlamaCppEngine)
