"""LLM.generate and LLM.chat: inputs, outputs in order, limits, refusals, interruption."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM, EngineArgs, RequestOutput, RequestOutputKind, SamplingParams, TextPrompt, TokensPrompt

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
REFUSING = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def test_vllms_offline_sample(scripted_checkpoint: Callable[..., Path], small: dict[str, Any]) -> None:
    model = scripted_checkpoint([*b" Paris", 257])
    # From here on vLLM's quickstart with the import changed.
    prompts = ["Hello, my name ", "The capital of France "]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95, top_k=1)
    llm = LLM(model=str(model), tensor_parallel_size=1, **small)
    outputs = llm.generate(prompts, sampling_params)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt == prompt
        assert output.outputs[0].text == "Paris"
        assert output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason is None
        assert output.outputs[0].token_ids[-1] == 257
        assert output.finished and output.error is None


def test_every_form_of_prompt(llm: LLM) -> None:
    tokens = list(b"abc")
    forms: list[Any] = ["abc", TextPrompt(prompt="abc"), TokensPrompt(prompt_token_ids=tokens), tokens]
    forms += [
        tuple(tokens),
        np.array(tokens, np.int32),
        jax.numpy.array(tokens),
        {"prompt_token_ids": tokens, "prompt": "shown"},
    ]
    singles = [llm.generate(form, GREEDY, use_tqdm=False) for form in forms]
    together = llm.generate(forms, GREEDY, use_tqdm=False)
    assert [len(single) for single in singles] == [1] * len(forms)
    assert ids(together) == [ids(single)[0] for single in singles] == [ids(together)[0]] * len(forms)
    assert [output.prompt for output in together] == ["abc", "abc", None, None, None, None, None, "shown"]
    assert all(output.prompt_token_ids == tokens for output in together)
    assert llm.generate([], GREEDY) == []


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(9)]
    params = [SamplingParams(temperature=0, max_tokens=9 - i, ignore_eos=True) for i in range(9)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    assert [len(tokens) for tokens in ids(outputs)] == list(range(9, 0, -1))
    alone = [llm.generate(prompt, one, use_tqdm=False)[0] for prompt, one in zip(prompts, params, strict=True)]
    assert ids(outputs) == ids(alone)


def test_samples_of_one_prompt(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=5, ignore_eos=True)
    first, second = (llm.generate("x", params, use_tqdm=False)[0] for _ in range(2))
    assert [completion.index for completion in first.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in first.outputs}) > 1
    assert ids([first]) == ids([second])


def test_streaming_kinds_make_no_difference_here(llm: LLM) -> None:
    plain = llm.generate("abc", GREEDY, use_tqdm=False)[0]
    for kind in RequestOutputKind:
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, output_kind=kind)
        output = llm.generate("abc", params, use_tqdm=False)[0]
        assert (output.outputs[0].text, ids([output])) == (plain.outputs[0].text, ids([plain]))
        assert params.output_kind is kind


@pytest.mark.parametrize(
    ("prompts", "params", "error", "message"),
    [
        (3, GREEDY, TypeError, "prompts=3"),
        (["a", 3.5], GREEDY, TypeError, "3.5"),
        (["a", None], GREEDY, TypeError, "None"),
        ([[1, "2"]], GREEDY, TypeError, "'2'"),
        ([True, False], GREEDY, TypeError, "True"),
        ({"text": "a"}, GREEDY, ValueError, "text='a'"),
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, GREEDY, ValueError, "multi_modal_data"),
        ({"prompt": None}, GREEDY, TypeError, "neither prompt nor prompt_token_ids"),
        ("a", {"temperature": 0}, TypeError, "sampling_params"),
        (["a", "b"], [GREEDY], ValueError, "sampling_params has 1 entries for 2 prompts"),
        (["a", "b"], [GREEDY, None], TypeError, "sampling_params holds None"),
    ],
)
def test_malformed_calls_raise_before_anything_runs(
    llm: LLM, prompts: Any, params: Any, error: type[Exception], message: str, idle: Callable[[LLM], bool]
) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(error, match=message):
        llm.generate(prompts, params, use_tqdm=False)
    assert idle(llm) and llm.stats().num_steps == steps


def test_unbuilt_keywords_are_refused_by_name(llm: LLM) -> None:
    assert llm.generate("a", GREEDY, use_tqdm=False, lora_request=None)[0].finished
    with pytest.raises(ValueError, match="lora_request='adapter' is not supported"):
        llm.generate("a", GREEDY, lora_request="adapter")
    with pytest.raises(TypeError, match="unknown argument colour=1"):
        llm.generate("a", GREEDY, colour=1)


def test_a_bad_prompt_among_good_ones(llm: LLM) -> None:
    prompts: list[Any] = ["good", "x" * 512, "", [300], "also good"]
    with pytest.warns(UserWarning, match=r"3 of 5 prompts ended with an error; the first is prompt 1: .*max_model_len"):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    good = llm.generate(["good", "also good"], GREEDY, use_tqdm=False)
    assert ids([outputs[0], outputs[4]]) == ids(good)
    for output, part in zip(outputs[1:4], ["512", "empty", "300"], strict=True):
        assert output.finished and part in (output.error or "")
        assert (output.outputs[0].finish_reason, output.outputs[0].token_ids) == ("error", [])


def test_only_bad_prompts(llm: LLM, idle: Callable[[LLM], bool]) -> None:
    for prompts in ("", [""], [[]], {"prompt_token_ids": []}, ["", "x" * 600]):
        with pytest.raises(ValueError, match="empty"):
            llm.generate(prompts, GREEDY, use_tqdm=False)
    assert idle(llm)


def test_bad_ids_fail_their_own_request_only(llm: LLM) -> None:
    bad = SamplingParams(stop_token_ids=[10**9], min_tokens=1)
    with pytest.raises(ValueError, match="stop_token_ids holds 1000000000"):
        llm.generate("a", bad, use_tqdm=False)
    with pytest.warns(UserWarning, match="1 of 2 prompts"):
        outputs = llm.generate(["a", "b"], [bad, GREEDY], use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("max_tokens", [None, 1, 2, 1000])
def test_length_limits(limited: LLM, length: int, max_tokens: int | None) -> None:
    """Field case 20: min(max_tokens, max_model_len - prompt) tokens; a prompt that leaves no room is refused."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    prompts = [list(range(1, 10)), [7] * length]
    if length >= 64:
        with pytest.warns(UserWarning, match=f"{length} tokens.*max_model_len=64"):
            good, bad = limited.generate(prompts, [GREEDY, params], use_tqdm=False)
        assert bad.error and len(good.outputs[0].token_ids) == 6
    else:
        output = limited.generate(prompts, [GREEDY, params], use_tqdm=False)[1]
        expected = min(max_tokens or 1000, 64 - length)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (expected, "length")


@pytest.fixture(scope="module")
def limited(text_config: Any, text_params: Any, small: dict[str, Any]) -> LLM:
    return LLM(model_config=text_config, params=text_params, max_model_len=64, **small)


def test_a_request_that_can_never_fit(
    text_config: Any, text_params: Any, small: dict[str, Any], idle: Callable[[LLM], bool]
) -> None:
    """Field case 4: a pool of 8 blocks of 16."""
    llm = LLM(model_config=text_config, params=text_params, num_gpu_blocks_override=8, **small)
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with pytest.raises(ValueError, match=r"200 tokens needs 13 KV blocks of 16 tokens, but the pool has 8"):
        llm.generate([[5] * 200], long, use_tqdm=False)
    with pytest.warns(UserWarning, match="prompt 0"):
        outputs = llm.generate([[5] * 200, [1, 2], [3, 4], [5, 6]], GREEDY, use_tqdm=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length", "length", "length"]
    for count in (1, 5):
        outputs = llm.generate([[5] * 100] * count, long, use_tqdm=False)
        # 28 more tokens fill the pool; the one drawn from the last of them needs no slot.
        assert [len(tokens) for tokens in ids(outputs)] == [29] * count
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert idle(llm)


def test_priorities(text_config: Any, text_params: Any, small: dict[str, Any]) -> None:
    llm = LLM(
        model_config=text_config, params=text_params, scheduling_policy="priority", **{**small, "max_num_seqs": 1}
    )
    outputs = llm.generate([[1], [2], [3]], GREEDY, use_tqdm=False, priority=[2, 1, 0])
    ends = [output.metrics.finished_time for output in outputs if output.metrics]
    assert ends == sorted(ends, reverse=True)
    with pytest.raises(ValueError, match="priority has 1 entries for 2 prompts"):
        llm.generate([[1], [2]], GREEDY, priority=[1])


def test_ctrl_c_drops_the_call_and_leaves_the_engine_usable(llm: LLM, idle: Callable[[LLM], bool]) -> None:
    expected = llm.generate("abc", GREEDY, use_tqdm=False)
    handler = signal.getsignal(signal.SIGINT)
    generated = llm.stats().num_generated_tokens

    def press_when_busy() -> None:
        while llm.stats().num_running == 0:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press_when_busy)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc"] * 40, SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)
    presser.join()
    assert llm.stats().num_generated_tokens - generated < 40 * 500 / 2
    assert signal.getsignal(signal.SIGINT) is handler
    assert idle(llm)
    assert ids(llm.generate("abc", GREEDY, use_tqdm=False)) == ids(expected)


def test_calls_from_several_threads(llm: LLM) -> None:
    expected = llm.generate(["a", "b", "c"], GREEDY, use_tqdm=False)
    found: dict[str, list[int]] = {}

    def work(prompt: str) -> None:
        found[prompt] = ids(llm.generate(prompt, GREEDY, use_tqdm=False))[0]

    threads = [threading.Thread(target=work, args=(prompt,)) for prompt in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[prompt] for prompt in "abc"] == ids(expected)


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr().err
    assert "Processed prompts: 100%" in shown and "2/2" in shown and "output" in shown and "tokens/s" in shown
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""
    assert threading.active_count() == before


def test_chat(llm: LLM) -> None:
    user = [{"role": "user", "content": "hi"}]
    outputs = llm.chat([user, [*user, {"role": "bot", "content": "yes"}]], GREEDY, use_tqdm=False, chat_template=CHAT)
    assert [output.prompt for output in outputs] == ["user: hi\nbot:", "user: hi\nbot: yes\nbot:"]
    assert ids(outputs) == ids(llm.generate([output.prompt or "" for output in outputs], GREEDY, use_tqdm=False))
    one = llm.chat(user, GREEDY, use_tqdm=False, chat_template=CHAT, add_generation_prompt=False)
    assert [output.prompt for output in one] == ["user: hi\n"]
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    shown = "{% for part in messages[0].content %}[{{ part.text or part }}]{% endfor %}"
    for form, prompt in (("auto", "[a][b]"), ("openai", "[a][b]"), ("string", "[a][\n][b]")):
        asked = {"chat_template": shown, "chat_template_content_format": form}
        assert llm.chat(parts, GREEDY, use_tqdm=False, **asked)[0].prompt == prompt


@pytest.mark.parametrize(
    ("messages", "template", "error", "message"),
    [
        ([], CHAT, ValueError, "messages=\\[\\]"),
        ([{"role": "user", "content": "hi"}], None, ValueError, "template"),
        ([{"role": "system", "content": "hi"}], REFUSING, ValueError, "no system role here"),
        ("hi", CHAT, TypeError, "messages='hi'"),
        ([{"role": "user", "content": "hi"}, "hi"], CHAT, TypeError, "'hi'"),
    ],
)
def test_chat_refusals(llm: LLM, messages: Any, template: str | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        llm.chat(messages, GREEDY, use_tqdm=False, chat_template=template)
    assert llm.generate("still here", GREEDY, use_tqdm=False)[0].finished


def test_without_a_tokenizer(limited: LLM) -> None:
    output = limited.generate([1, 2, 3], GREEDY, use_tqdm=False)[0]
    assert (output.outputs[0].text, len(output.outputs[0].token_ids)) == ("", 6)
    with pytest.raises(ValueError, match="a text prompt needs a tokenizer"):
        limited.generate("text", GREEDY)
    with pytest.raises(ValueError, match=r"chat\(\) needs a tokenizer"):
        limited.chat([{"role": "user", "content": "hi"}], GREEDY)
    with pytest.raises(ValueError, match=r"get_tokenizer\(\) needs a tokenizer"):
        limited.get_tokenizer()


def test_skip_tokenizer_init(scripted_checkpoint: Callable[..., Path], small: dict[str, Any]) -> None:
    args = EngineArgs(scripted_checkpoint([5, 6, 7, 8, 5]), skip_tokenizer_init=True, **small)
    llm = LLM.from_engine_args(args)
    assert ids(llm.generate([5], GREEDY, use_tqdm=False)) == [[6, 7, 8, 5, 6, 7]]
    with pytest.raises(ValueError, match="needs a tokenizer"):
        llm.generate("text", GREEDY)
