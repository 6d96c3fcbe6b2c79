"""Settings that a checkpoint's files say wrong or leave out: errors name the file, its own key and the value."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.checkpoint import checkpoint as checkpoint_module
from jaxinfer.checkpoint import open_checkpoint
from jaxinfer.checkpoint.gguf import read_gguf
from jaxinfer.models.registry import FAMILIES
from jaxinfer.planning.planned_model import planned_model

NAN = float("nan")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", None, "no 'llama.block_count'"),
        ("block_count", 0, "llama.block_count=0 must be an int of at least 1"),
        ("context_length", None, "no 'llama.context_length'"),
        ("embedding_length", 0, "llama.embedding_length=0 must be an int of at least 1"),
        ("attention.head_count", None, "no 'llama.attention.head_count'"),
        ("attention.head_count", 0, "llama.attention.head_count=0 must be an int of at least 1"),
        ("attention.head_count_kv", 3, "llama.attention.head_count_kv=3 must divide llama.attention.head_count=8"),
        ("attention.key_length", "16", "llama.attention.key_length='16' must be an int"),
        ("attention.layer_norm_rms_epsilon", None, "no llama.attention.layer_norm_rms_epsilon"),
        (
            "attention.layer_norm_rms_epsilon",
            NAN,
            "llama.attention.layer_norm_rms_epsilon=nan must be a number above 0",
        ),
        ("rope.dimension_count", 0, "llama.rope.dimension_count=0 must be an int of at least 1"),
        ("rope.freq_base", 0.0, "llama.rope.freq_base=0.0 must be a number above 0"),
    ],
)
def test_gguf_keys_that_are_missing_or_wrong(
    key: str, value: Any, message: str, gguf_twin: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf_twin("tiny_llama")
    file = read_gguf(path)
    metadata = {**file.metadata, f"llama.{key}": value}
    edited = replace(file, metadata={name: said for name, said in metadata.items() if said is not None})
    monkeypatch.setattr(checkpoint_module, "read_gguf", lambda path: edited)
    with pytest.raises(ValueError, match=rf"tiny_llama-F32\.gguf: .*{re.escape(message)}"):
        open_checkpoint(path)


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, float("inf")])
def test_gguf_divisors_of_the_frequencies_must_be_positive(value: float, gguf_twin: Any) -> None:
    path = gguf_twin("tiny_llama", extra={"rope_freqs.weight": np.full(8, value)})
    with pytest.raises(ValueError, match=rf"gguf: tensor 'rope_freqs\.weight' has the value {value}"):
        open_checkpoint(path)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("ids", [99999, -1, [2, 256]], ids=str)
def test_end_ids_outside_the_vocabulary_are_left_out_with_a_warning(file: str, ids: Any, hf_copy: Any) -> None:
    folder = hf_copy("tiny_llama", eos_token_id=1)
    path = folder / file
    said = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(said | {"eos_token_id": ids}))
    with pytest.warns(UserWarning, match=rf"{file}: eos_token_id=.* outside the vocabulary's ids 0 to 255"):
        ends = open_checkpoint(folder).eos_token_ids
    assert ends - {1} == ({2} if isinstance(ids, list) else set())


def test_an_end_id_of_true_is_refused(hf_copy: Any) -> None:
    with pytest.raises(ValueError, match=r"config\.json: eos_token_id=True must be a token id"):
        open_checkpoint(hf_copy("tiny_llama", eos_token_id=True))


@pytest.mark.parametrize("error", [ZeroDivisionError, OverflowError, AttributeError, KeyError, IndexError, TypeError])
def test_whatever_a_value_makes_go_wrong_names_the_file(
    error: type[Exception], hf_copy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(config: Any) -> Any:
        raise error("a surprise")

    families = [replace(family, model_config=broken) for family in FAMILIES]
    monkeypatch.setattr("jaxinfer.models.registry.FAMILIES", families)
    folder: Path = hf_copy("tiny_llama")
    for read in (open_checkpoint, planned_model):
        with pytest.raises(ValueError, match=r"tiny_llama/config\.json: .*a surprise"):
            read(folder)
