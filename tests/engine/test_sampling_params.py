"""SamplingParams: vLLM's names, defaults and checks; field cases 1, 2, 5, 10, 12 and 20 where decided here."""

import dataclasses

import pytest

from jaxinfer.engine.sampling_params import RequestOutputKind, SamplingParams

# Names, order and defaults as vLLM documents them (lists are what it normalises None to).
VLLM_DEFAULTS = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "seed": None,
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "detokenize": True,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "output_kind": RequestOutputKind.CUMULATIVE,
    "stream_interval": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": [],
    "structured_outputs": None,
    "flat_logprobs": False,
    "extra_args": None,
    "skip_reading_prefix_cache": None,
    "thinking_token_budget": None,
    "repetition_detection": None,
    "trace_decode_token_ids": None,
}

NO_EOS: frozenset[int] = frozenset()


class TableTokenizer:
    """Encodes whole texts from a table, as a real tokenizer's pieces would come out."""

    def __init__(self, table: dict[str, list[int]]) -> None:
        self.table = table

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return list(self.table[text])


# SmolLM2's own pieces (field case 5).
SMOLLM2 = TableTokenizer(
    {
        "\n": [198],
        "described": [12390, 7199],
        " described": [3873],
        "\ndescribed": [198, 12390, 7199],
        "London": [21253],
        " London": [4528],
        "\nLondon": [198, 21253],
    }
)


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    for name, default in VLLM_DEFAULTS.items():
        assert getattr(params, name) == default, name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 0),
        ("n", 16385),
        ("presence_penalty", 2.1),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -2),
        ("seed", 2**63),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("logprobs", -2),
        ("prompt_logprobs", -2),
        ("stream_interval", 0),
        ("allowed_token_ids", []),
        ("bad_words", [""]),
        ("structured_outputs", {"regex": "a"}),
        ("logprob_token_ids", [1]),
        ("flat_logprobs", True),
        ("extra_args", {"a": 1}),
        ("thinking_token_budget", 5),
        ("repetition_detection", {"min_count": 2}),
        ("routed_experts_prompt_start", 1),
        ("trace_decode_token_ids", [1]),
        ("prompt_logprob_start", 3),
        ("prompt_logprob_token_ids", [3]),
        ("skip_clone", True),
    ],
)
def test_bad_value_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", 1.5),
        ("n", True),
        ("temperature", "hot"),
        ("top_k", 2.0),
        ("seed", "7"),
        ("max_tokens", "16"),
        ("logprobs", True),
        ("ignore_eos", 1),
        ("output_kind", 2),
        ("stop", 3),
        ("stop", [3]),
        ("bad_words", "word"),
        ("stop_token_ids", ["2"]),
        ("stop_token_ids", 2.5),
        ("allowed_token_ids", "12"),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {1: "x"}),
        ("skip_reading_prefix_cache", 1),
    ],
)
def test_wrong_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


def test_unknown_field_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


def test_values_are_normalised() -> None:
    params = SamplingParams(top_k=-1, seed=-1, stop="END", stop_token_ids=(3,), logit_bias={"5": 1000, 6: -1000})
    assert (params.top_k, params.seed, params.stop, params.stop_token_ids) == (0, None, ["END"], [3])
    assert params.logit_bias == {5: 100.0, 6: -100.0}
    assert SamplingParams(stop=None, bad_words=None, stop_token_ids=None).stop == []  # type: ignore[arg-type]


def test_seed_zero_and_the_largest_seed_are_seeds() -> None:
    assert SamplingParams(seed=0).seed == 0
    assert SamplingParams(seed=2**63 - 1).seed == 2**63 - 1


def test_greedy_switches_the_filters_off_and_refuses_many_samples() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=3, min_p=0.2)
    assert params.is_greedy and (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    with pytest.raises(ValueError, match="n=2 with temperature=0"):
        SamplingParams(n=2, temperature=0)


def test_tiny_temperature_is_raised_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="temperature=0.001"):
        params = SamplingParams(temperature=0.001)
    assert params.temperature == 0.01


def test_stop_needs_text() -> None:
    with pytest.raises(ValueError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_min_tokens_may_reach_max_tokens_or_anything_without_one() -> None:
    assert SamplingParams(min_tokens=16).min_tokens == 16
    assert SamplingParams(min_tokens=500, max_tokens=None).min_tokens == 500


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.5},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {1: 1.0}},
        {"allowed_token_ids": [1]},
        {"bad_words": ["x"]},
        {"min_tokens": 1},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
    ],
)
def test_only_plain_greedy_needs_no_sampler(changed: dict) -> None:
    assert not SamplingParams(temperature=0, stop="x", stop_token_ids=[4], ignore_eos=True).needs_sampler
    assert SamplingParams(**{"temperature": 0, **changed}).needs_sampler


def test_clone_checks_again_and_shares_nothing() -> None:
    params = SamplingParams(stop=["a"], logit_bias={1: 1.0}, allowed_token_ids=[1, 2])
    copy = params.clone()
    assert copy == params
    copy.stop.append("b")  # type: ignore[attr-defined]
    copy.allowed_token_ids.append(3)  # type: ignore[union-attr]
    assert params.stop == ["a"] and params.allowed_token_ids == [1, 2]
    params.max_tokens = 0
    with pytest.raises(ValueError, match="max_tokens=0"):
        params.clone()


def test_repr_shows_what_was_set() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    shown = repr(SamplingParams(max_tokens=None, stop="x", seed=0))
    assert shown == "SamplingParams(seed=0, stop=['x'], max_tokens=None)"


def test_bad_words_get_both_spellings_each_with_its_own_length() -> None:
    params = SamplingParams(bad_words=["described", " London"]).with_bad_words(SMOLLM2)  # type: ignore[arg-type]
    assert set(params.bad_words_token_ids) == {(12390, 7199), (3873,), (21253,), (4528,)}
    assert params.clone().bad_words_token_ids == params.bad_words_token_ids


def test_bad_word_of_a_tokenizer_that_puts_a_space_first() -> None:
    # sentencepiece: 29871 is the bare space piece, 4517 is "_London", 29931 898 is "L" "ondon" inside a text.
    tokenizer = TableTokenizer(
        {"\n": [29871, 13], "London": [4517], " London": [29871, 4517], "\nLondon": [29871, 13, 29931, 898]}
    )
    params = SamplingParams(bad_words=["London"]).with_bad_words(tokenizer)  # type: ignore[arg-type]
    # 29871 4517 is banned already, because 4517 is.
    assert params.bad_words_token_ids == ((4517,), (29931, 898))


def test_bad_word_without_tokens_is_refused() -> None:
    tokenizer = TableTokenizer({"\n": [198], "~": [], " ~": [], "\n~": [198]})
    with pytest.raises(ValueError, match="bad_words holds '~'"):
        SamplingParams(bad_words=["~"]).with_bad_words(tokenizer)  # type: ignore[arg-type]


def test_allow_list_emptied_by_bans_is_refused() -> None:
    params = SamplingParams(allowed_token_ids=[4528], bad_words=["London"]).with_bad_words(SMOLLM2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="allowed_token_ids"):
        params.check_model(49152, 20, NO_EOS)
    with pytest.raises(ValueError, match="min_tokens=1"):
        SamplingParams(allowed_token_ids=[2], min_tokens=1).check_model(49152, 20, frozenset({2}))
    SamplingParams(allowed_token_ids=[2]).check_model(49152, 20, frozenset({2}))
    both = SamplingParams(allowed_token_ids=[2, 4528], bad_words=["London"], min_tokens=1)
    with pytest.raises(ValueError, match="no token could be generated"):
        both.with_bad_words(SMOLLM2).check_model(49152, 20, frozenset({2}))  # type: ignore[arg-type]


@pytest.mark.parametrize("token", [49152, -1, 10**9])
@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_ids_outside_the_vocabulary_are_refused(name: str, token: int) -> None:
    value = {token: 1.0} if name == "logit_bias" else [token]
    params = SamplingParams(min_tokens=1, **{name: value})
    with pytest.raises(ValueError, match=rf"{name} holds {token}, outside .* 0 to 49151"):
        params.check_model(49152, 20, NO_EOS)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_number_of_logprobs_has_a_limit(name: str) -> None:
    def check(count: int, max_logprobs: int) -> None:
        SamplingParams(**{name: count}).check_model(49152, max_logprobs, NO_EOS)

    for count in (0, 1, 20, -1):
        check(count, 20)
    check(49152, -1)
    for count, limit in ((21, 20), (10**6, 20), (49153, -1), (1, 0)):
        with pytest.raises(ValueError, match=f"{name}={count} exceeds the limit of .*max_logprobs"):
            check(count, limit)


def test_every_field_of_the_class_is_documented_or_refused() -> None:
    documented = SamplingParams.__doc__ or ""
    for item in dataclasses.fields(SamplingParams):
        if item.name == "bad_words_token_ids":
            continue
        try:
            SamplingParams(**{item.name: object()})
        except ValueError as error:
            assert "not supported" in str(error)
        except TypeError:
            assert f"{item.name}:" in documented
        else:
            pytest.fail(f"{item.name} takes anything")


def test_scored_prompts_cannot_come_from_the_prefix_cache() -> None:
    assert SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=True).skip_reading_prefix_cache is True
    assert SamplingParams(skip_reading_prefix_cache=False).skip_reading_prefix_cache is False
    with pytest.raises(ValueError, match="skip_reading_prefix_cache=False contradicts prompt_logprobs"):
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)
