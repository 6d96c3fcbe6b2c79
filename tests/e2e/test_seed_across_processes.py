"""A seed means the same tokens in another process (field case 2)."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxinfer import LLM, SamplingParams
from jaxinfer.models.config import ModelConfig

SAMPLING = {"temperature": 0.8, "max_tokens": 16, "ignore_eos": True, "seed": 42}
SCRIPT = """
import json, sys
from jaxinfer import LLM, SamplingParams
llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
other, seeded = llm.generate([[3], [5, 6]], [SamplingParams(max_tokens=9), SamplingParams(**json.loads(sys.argv[3]))])
print(json.dumps(seeded.outputs[0].token_ids))
"""


def test_a_fresh_process_draws_the_same(
    text_config: ModelConfig, text_params: Any, write_checkpoint: Callable[..., Path], small: dict[str, Any]
) -> None:
    model = write_checkpoint(text_config, text_params)
    with LLM(model, **small) as llm:
        here = llm.generate([5, 6], SamplingParams(**SAMPLING), use_tqdm=False)[0].outputs[0].token_ids
    arguments = [str(model), json.dumps(small), json.dumps(SAMPLING)]
    fresh = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, check=True)
    assert json.loads(fresh.stdout.splitlines()[-1]) == here
