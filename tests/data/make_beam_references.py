"""Makes beam_search_smollm2.json: beam search by transformers in float32, on prompts of golden_smollm2.json.

    python make_beam_references.py FOLDER_OF_SMOLLM2_IN_FLOAT32

Run with torch 2.13.0 and transformers 5.24.0 in an environment of their own; the tests read only what is committed. The
weights are those of the Q4_1 GGUF file dequantised to float32 (`jaxinfer convert`). Every case is one call of
`generate` with do_sample=False and early_stopping=False that returns all its beams; `scores` are transformers' own, the
sum of the log-probabilities over the number of generated tokens (the end among them) to the power of length_penalty.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

HERE = Path(__file__).parent
EOS_TOKEN_IDS = [0, 2]
CASES = [
    {"prompt": "raw_france", "beam_width": 4, "max_tokens": 24, "length_penalty": 1.0},
    {"prompt": "raw_france", "beam_width": 4, "max_tokens": 16, "length_penalty": 0.0},
    {"prompt": "chat_multi", "beam_width": 4, "max_tokens": 24, "length_penalty": 1.0},
    {"prompt": "chat_system", "beam_width": 3, "max_tokens": 16, "length_penalty": 2.0},
    {"prompt": "chat_hello", "beam_width": 2, "max_tokens": 16, "length_penalty": -1.0},
    {"prompt": "raw_story", "beam_width": 8, "max_tokens": 8, "length_penalty": 1.0},
    {"prompt": "chat_multi", "beam_width": 3, "max_tokens": 12, "length_penalty": 1.0, "ignore_eos": True},
]


def main() -> None:
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        sys.argv[1], dtype=torch.float32, attn_implementation="eager"
    )
    prompts = {entry["name"]: entry for entry in json.loads((HERE / "golden_smollm2.json").read_text())["prompts"]}
    cases = [{**case, **search(model, prompts[case["prompt"]]["prompt_ids"], case)} for case in CASES]
    source = f"transformers {transformers.__version__}, torch {torch.__version__}, float32 eager"
    text = json.dumps({"source": source, "eos_token_ids": EOS_TOKEN_IDS, "cases": cases}, indent=None)
    (HERE / "beam_search_smollm2.json").write_text(text.replace('{"prompt":', '\n{"prompt":') + "\n")


def search(model: Any, prompt_ids: list[int], case: dict[str, Any]) -> dict[str, Any]:
    """The beams of one case, best first: generated ids up to and with the end, and transformers' scores."""
    ends = [] if case.get("ignore_eos") else EOS_TOKEN_IDS
    config = transformers.GenerationConfig(
        num_beams=case["beam_width"],
        num_return_sequences=case["beam_width"],
        max_new_tokens=case["max_tokens"],
        length_penalty=case["length_penalty"],
        do_sample=False,
        early_stopping=False,
        eos_token_id=ends or None,
        pad_token_id=ends[-1] if ends else 0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    model.generation_config = config
    output = model.generate(torch.tensor([prompt_ids]), generation_config=config)
    beams = [cut(row[len(prompt_ids) :], ends) for row in output.sequences.tolist()]
    return {"beams": beams, "scores": [round(score, 6) for score in output.sequences_scores.tolist()]}


def cut(ids: list[int], ends: list[int]) -> list[int]:
    """Without the padding behind the end."""
    found = [index for index, token in enumerate(ids) if token in ends]
    return ids[: found[0] + 1] if found else ids


if __name__ == "__main__":
    main()
