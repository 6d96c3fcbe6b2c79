"""Chat templates: text as transformers renders it, messages as users send them, and every way they can be wrong.

Field case 19.
"""

import copy
import enum
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.tokenizers.chat import ChatTemplates
from jaxinfer.tokenizers.messages import check_messages

GOLDEN = json.loads((Path(__file__).parent / "chat_cases.json").read_text(encoding="utf-8"))
STYLES = json.loads((Path(__file__).parents[1] / "data" / "chat_templates.json").read_text(encoding="utf-8"))
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + PLAIN
CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}:"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}"
    "[{{ m.content }}]{% endfor %}"
)
USER = {"role": "user", "content": "hi"}


def render(template: str, messages: Any, **options: Any) -> str:
    return ChatTemplates({"default": template}, {"bos_token": "<s>"}).render(messages, **options)


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])
def test_equals_transformers(case: dict[str, Any]) -> None:
    templates = ChatTemplates({"default": case["template"]}, GOLDEN["special_tokens"])
    assert templates.render(case["messages"], **case["options"]) == case["expected"]


@pytest.mark.parametrize("case", STYLES["cases"], ids=lambda case: case["name"])
def test_templates_in_the_styles_of_models(case: dict[str, Any]) -> None:
    """Made by transformers, errors too: data/make_chat_references.py."""
    templates = ChatTemplates({"default": STYLES["templates"][case["template"]]}, STYLES["special_tokens"])
    before = copy.deepcopy(case)
    if "expected" in case:
        assert templates.render(case["messages"], **case["options"]) == case["expected"]
    else:
        ours = "does not print the last message" if "continue_final" in case["error"] else re.escape(case["error"])
        with pytest.raises(ValueError, match=ours):
            templates.render(case["messages"], **case["options"])
    assert case == before


def test_generation_prompt_once_or_not_at_all() -> None:
    assert render(PLAIN, [USER]) == "<user>hi</user><assistant>"
    assert render(PLAIN, [USER], add_generation_prompt=False) == "<user>hi</user>"


def test_error_of_the_template_is_a_value_error_with_its_message() -> None:
    with pytest.raises(ValueError, match="System role not supported"):
        render(NO_SYSTEM, [{"role": "system", "content": "x"}, USER])
    assert render(NO_SYSTEM, [USER]) == "<user>hi</user><assistant>"  # and the next conversation is served


@pytest.mark.parametrize(
    "template",
    [
        "{{ missing.attribute }}",
        "{{ 'a' + messages }}",
        "{{ 1 / 0 }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ namespace(x=1).__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.x = messages.__class__.__base__ %}{{ ns.x.y.z }}",
    ],
)
def test_broken_and_hostile_templates_are_value_errors(template: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        render(template, [USER])


def test_template_that_does_not_parse() -> None:
    with pytest.raises(ValueError, match="does not parse: line 2"):
        render("{{ 1 }}\n{% if %}", [USER])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "a"}, "b"], "a\nb"),
        ("{{ bos_token }} ünï", "{{ bos_token }} ünï"),
    ],
)
def test_content(content: Any, text: str) -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": content}]) == text
    assert render(PLAIN, [{"role": "user"}]) == "<user></user><assistant>"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"a": 3, "b": "x"}', "f:a=3;b=x;[]"), ({"a": 3}, "f:a=3;[]"), ("", "f:[]"), (None, "f:[]"), ("{}", "f:[]")],
)
def test_tool_call_arguments(arguments: Any, text: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    before = copy.deepcopy(messages)
    assert render(CALLS, messages) == text
    assert messages == before  # the caller's objects stay as they are


def test_tool_calls_none_and_tool_results() -> None:
    messages = [{"role": "assistant", "content": "x", "tool_calls": None}, {"role": "tool", "content": "22"}]
    assert render(CALLS, messages) == "[x][22]"


def test_both_prompt_and_continuation_are_refused() -> None:
    with pytest.raises(ValueError, match="add_generation_prompt=True.*continue_final_message=True"):
        render(PLAIN, [USER], add_generation_prompt=True, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        ("{{ m.content }}<end>", "It is ", "<a>It is "),
        ("{{ m.content | trim }}<end>", "It is ", "<a>It is"),
        ("{{ m.content }}<end>", "", "<a>"),
        ("{{ m.content }}<end>", None, "<a>"),
        ("{{ m.content }}<end>", [{"type": "text", "text": "It"}], "<a>It"),
    ],
)
def test_continuing_the_last_message(template: str, content: Any, expected: str) -> None:
    source = "{% for m in messages %}<a>" + template + "{% endfor %}"
    messages = [{"role": "assistant", "content": content}]
    assert render(source, messages, add_generation_prompt=False, continue_final_message=True) == expected


def test_continuing_what_the_template_drops() -> None:
    with pytest.raises(ValueError, match="does not print the last message"):
        render("{{ bos_token }}", [USER], add_generation_prompt=False, continue_final_message=True)


def test_tools_choose_their_template() -> None:
    templates = ChatTemplates({"default": "D", "tool_use": "T"}, {})
    assert [templates.render([USER], tools=tools) for tools in (None, [], [{"type": "function"}])] == ["D", "T", "T"]


def test_no_template() -> None:
    with pytest.raises(ValueError, match=r"no chat template.*chat_template="):
        ChatTemplates({}, {}).render([USER])
    assert ChatTemplates({}, {}).render([USER], chat_template=PLAIN) == "<user>hi</user><assistant>"
    with pytest.raises(ValueError, match=r"it has \['rag', 'tools'\]"):
        ChatTemplates({"rag": "R", "tools": "T"}, {}).render([USER])


@pytest.mark.parametrize(
    ("messages", "error", "message"),
    [
        ([], ValueError, r"messages=\[\]"),
        ("hi", TypeError, "list of dicts"),
        (USER, TypeError, "list of dicts"),
        (["hi"], TypeError, r"messages\[0\] must be a dict"),
        ([USER, {"content": "x"}], ValueError, r"messages\[1\].role=None"),
        ([{"role": 3, "content": "x"}], ValueError, r"messages\[0\].role=3"),
        ([{"role": "user", "content": 3}], ValueError, r"messages\[0\].content must be a string.*int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], ValueError, r"content\[0\].type='image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], ValueError, r"content\[0\].text=None"),
        ([{"role": "user", "content": [3]}], ValueError, r"content\[0\] must be"),
        ([{"role": "assistant", "tool_calls": {}}], ValueError, r"messages\[0\].tool_calls must be a list"),
        ([{"role": "assistant", "tool_calls": ["f"]}], ValueError, r"tool_calls\[0\] must be a dict"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            ValueError,
            r"tool_calls\[0\].function.arguments='\{' is not JSON",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}],
            ValueError,
            "must be a JSON object, not list",
        ),
    ],
)
def test_malformed_messages_name_the_field(messages: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_messages(messages)


def test_date_and_json_for_templates() -> None:
    assert len(render("{{ strftime_now('%Y') }}", [USER])) == 4
    assert render("{{ {'a': 'é<'} | tojson }}", [USER]) == '{"a": "é<"}'
    assert render("{{ bos_token }}{{ eos_token }}|", [USER]) == "<s>|"


LOOPING = "{% for m in messages %}<{% for part in m.content %}[{{ part.text }}]{% endfor %}>{% endfor %}"
EITHER = (
    "{% for m in messages %}{% set c = m['content'] %}{% if c is string %}{{ c }}{% else %}"
    "{% for part in c | list %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
PARTS = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]


@pytest.mark.parametrize(
    ("template", "form", "of_parts", "of_text"),
    [
        ("{{ messages[0].content }}", "auto", "a\nb", "hi"),
        (LOOPING, "auto", "<[a][b]>", "<[hi]>"),
        (EITHER, "auto", "[a][b]", "hi"),
        (EITHER, "string", "a\nb", "hi"),
        (EITHER, "openai", "[a][b]", "[hi]"),
        ("{% for key in messages %}{{ key.content }}{% endfor %}", "auto", "a\nb", "hi"),
    ],
)
def test_content_is_what_the_template_reads(template: str, form: str, of_parts: str, of_text: str) -> None:
    assert render(template, PARTS, chat_template_content_format=form) == of_parts
    assert render(template, [USER], chat_template_content_format=form) == of_text


def test_content_of_lists_is_empty_or_continued() -> None:
    assert render(LOOPING, [{"role": "user", "content": None}]) == "<>"
    go_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(LOOPING, [USER, {"role": "assistant", "content": None}], **go_on) == "<[hi]><["
    assert render(LOOPING, [USER, *PARTS], **go_on) == "<[hi]><[a][b"
    with pytest.raises(ValueError, match="chat_template_content_format='html' must be"):
        render(PLAIN, [USER], chat_template_content_format="html")


class Role(str, enum.Enum):  # noqa: UP042 - str() of it is not its value
    USER = "user"


@dataclass
class Call:
    name: str
    arguments: str


class Model:
    """Has what pydantic's models have."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields

    def model_dump(self) -> dict[str, Any]:
        return self.fields


def test_objects_are_read_as_data() -> None:
    """As OpenAI's client returns messages, to be sent back."""
    call = Model(id="1", function=Call("f", '{"a": 3}'))
    answer = Model(role="assistant", content=None, tool_calls=[call], refusal=None)
    assert render(CALLS, [{"role": Role.USER, "content": "hi"}, answer]) == "[hi]f:a=3;[]"
    assert render("{{ messages[0].role }}{{ x }}{{ y }}", [{"role": Role.USER}], x=np.int64(3), y=np.bool_(False)) == (
        "user3False"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": [len]}, r"tools\[0\] is of the type builtin_function_or_method"),
        ({"tools": ["f"]}, r"tools\[0\] must be a dict, not str"),
        ({"tools": {"type": "function"}}, "tools must be a list of dicts, not dict"),
        ({"documents": "text"}, "documents must be a list of dicts, not str"),
        ({"now": np.zeros(2)}, "chat_template_kwargs.now is of the type ndarray"),
        ({"continue_final_message": "thinking"}, "continue_final_message='thinking' must be True or False"),
    ],
)
def test_options_of_the_wrong_type(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        render(PLAIN, [USER], **{"add_generation_prompt": False, **options})


def test_templates_that_never_end_or_fill_the_memory() -> None:
    """As far as Jinja's sandbox goes: depth and lengths of ranges are bounded."""
    recursion = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    for template in (recursion, "{% for i in range(10 ** 9) %}{% endfor %}", "{{ 'a' * 10 ** 15 }}"):
        with pytest.raises(ValueError, match="the chat template failed"):
            render(template, [USER])
