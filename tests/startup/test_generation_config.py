"""What a generation config says, and where it may lie."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.startup.generation_config import check_override, end_ids, read_generation_config, sampling_defaults


@pytest.mark.parametrize(
    ("value", "ids"), [(None, set()), (0, {0}), (7, {7}), ([2, 0], {0, 2}), ([], set()), ((3,), {3})], ids=str
)
def test_ends(value: Any, ids: set[int]) -> None:
    assert end_ids({"eos_token_id": value}) == ids
    assert end_ids({}) == frozenset()


@pytest.mark.parametrize("value", ["</s>", 1.5, [1, None], [True], {"a": 1}], ids=str)
def test_ends_that_are_no_ids(value: Any) -> None:
    with pytest.raises(ValueError, match=r"eos_token_id=.* must be a token id, a list of them, or null"):
        end_ids({"eos_token_id": value})


def test_entries_that_set_sampling() -> None:
    entries = {
        "temperature": 0.3,
        "top_k": 5,
        "top_p": None,
        "max_new_tokens": 9,
        "do_sample": False,
        "pad_token_id": 1,
    }
    assert sampling_defaults(entries) == {"temperature": 0.3, "top_k": 5, "max_tokens": 9}
    with pytest.raises(ValueError, match="the generation config does not fit: .*temperature.*generation_config='vllm'"):
        sampling_defaults({"temperature": -1.0})


def test_where_the_entries_come_from(tmp_path: Path) -> None:
    own = {"temperature": 0.1}
    assert read_generation_config("auto", own) == own
    assert read_generation_config("vllm", own) == {}
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"top_k": 3}))
    assert read_generation_config(tmp_path, own) == read_generation_config(str(file), own) == {"top_k": 3}
    file.write_text("[1]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        read_generation_config(tmp_path, own)
    file.write_text("{")
    with pytest.raises(ValueError, match="must be 'auto', 'vllm' or a folder with generation_config.json"):
        read_generation_config(tmp_path, own)


def test_overrides_that_change_nothing_are_refused() -> None:
    check_override({"eos_token_id": 3, "max_new_tokens": 5})
    with pytest.raises(ValueError, match="override_generation_config holds 'do_sample', which changes nothing"):
        check_override({"do_sample": True})
    with pytest.raises(TypeError, match="override_generation_config=3 must be a mapping"):
        check_override(3)
