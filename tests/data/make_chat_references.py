"""Makes chat_templates.json: conversations rendered by transformers, from templates in the styles of models.

    python make_chat_references.py

Run with transformers 5.24.0 in an environment of its own; the tests read only the file.
"""

import json
from pathlib import Path
from typing import Any

from transformers.utils.chat_template_utils import render_jinja_template

OUTPUT = Path(__file__).parent / "chat_templates.json"
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

LLAMA = """\
{{- bos_token }}
{%- if not date_string is defined %}{%- set date_string = "5 May 2025" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start|>system\\n" }}
{%- if tools is not none %}{{- "Environment: tools\\n" }}{%- endif %}
{{- "Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message }}{{- "<|eot|>" }}
{%- for message in messages %}
    {%- if message.role == 'tool' or message.role == 'ipython' %}
        {{- "<|start|>ipython\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "<|eot|>" }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}{{- raise_exception("one tool call at a time!") }}{%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start|>assistant\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson + '}<|eot|>' }}
    {%- else %}
        {{- '<|start|>' + message['role'] + '\\n' + message['content'] | trim + '<|eot|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}
"""
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- else %}{{- 'Be helpful.' }}{%- endif %}
    {{- "\\n\\n# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}
            {{- tool_call.name }}
            {{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}
        {{- message.content }}
        {{- '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace() %}
{%- set ns.index = 0 %}
{%- for message in loop_messages %}
    {%- if not (message.role == "tool" or (message.tool_calls is defined and message.tool_calls is not none)) %}
        {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
            {{- raise_exception("users and assistants must take turns") }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[TOOLS] [" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}
                        {{- '"' + key + '": "' + val + '"' }}
                    {%- else %}
                        {{- '"' + key + '": ' + val | tojson }}
                    {%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
                {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" }}{%- endif %}
            {%- endfor %}
            {{- "[/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for tool_call in message.tool_calls %}
            {%- set out = tool_call.function | tojson %}
            {{- out[:-1] }}
            {{- ', "id": "' + tool_call.id + '"}' }}
            {%- if not loop.last %}{{- ", " }}{%- else %}{{- "]" + eos_token }}{%- endif %}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"] | trim + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
    {%- endif %}
{%- endfor %}
"""
GEMMA = """\
{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '\n\n' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '\n\n' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("users and models must take turns") }}
    {%- endif -%}
    {%- set role = "model" if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("cannot show this") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\n' }}{%- endif -%}
"""
SMOLLM = """\
{# Comments, macros, generation blocks and defaults. #}
{%- if enable_thinking is not defined -%}{%- set enable_thinking = true -%}{%- endif -%}
{%- set mode = "/think" if enable_thinking else "/no_think" -%}
{%- macro turn(role, text) -%}<|im_start|>{{ role }}
{{ text }}<|im_end|>
{% endmacro -%}
{{- turn("system", "# Mode\n" + mode + (xml_tools | map("tojson") | join("\n") if xml_tools else "")) }}
{% for message in messages %}
    {% set content = message.content if message.content is string else "" %}
    {% if message.role == "skip" %}
        {% continue %}
    {% elif message.role == "user" %}
        {{ turn(message.role, content) }}
    {% elif message.role == "assistant" %}
        {% generation %}
        {% set shown = content.lstrip("\n") %}
        {% if mode == "/think" and message.reasoning_content is defined %}
            {{ turn("assistant", "<think>" + message.reasoning_content + "</think>" + shown) }}
        {% else %}
            {{ turn("assistant", shown) }}
        {% endif %}
        {% endgeneration %}
        {{- "leak" if shown is defined }}
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}{{ "<|im_start|>assistant\n" }}{% endif %}
"""
DOCUMENTS = """\
{% for document in documents or [] %}<doc title="{{ document['title'] }}">{{ document.text }}</doc>
{% endfor %}{% for message in messages %}{{ message['role'] | upper }}: {{ message['content'] }}
{% endfor %}{{ {'é': [1, 2.5, true, none, '<>&\\'"']} | tojson }}|{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}"""
PARTS = """\
{% for m in messages %}<{{ m.role }}>{% for part in m['content'] %}\
{% if part.type == 'text' %}[{{ part.text }}]{% endif %}{% endfor %}</{{ m.role }}>{% endfor %}"""
DEEPSEEK = """\
{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}\
<A>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% else %}\
<U>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<A><think>\n{% endif %}"""

SYSTEM = {"role": "system", "content": "  Be short.  "}
USER = {"role": "user", "content": "What is 2 + 3? "}
ANSWER = {"role": "assistant", "content": " It is 5. "}
AGAIN = {"role": "user", "content": "Sure?"}
CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": [3, "ü"]}}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "5"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds numbers – <exactly>",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
THOUGHT = {"role": "assistant", "content": "\n5", "reasoning": "2 + 3"}
LISTED = {"role": "user", "content": [{"type": "text", "text": " one "}, {"type": "text", "text": "two"}]}
PROMPT, NOTHING = {"add_generation_prompt": True}, {"add_generation_prompt": False}
GO_ON = {"add_generation_prompt": False, "continue_final_message": True}


def cases() -> list[tuple[str, str, list[dict[str, Any]], dict[str, Any]]]:
    plain, turns, tool_turns = [USER], [SYSTEM, USER, ANSWER, AGAIN], [SYSTEM, USER, CALLING, RESULT]
    every = {"llama": LLAMA, "qwen": QWEN, "mistral": MISTRAL, "gemma": GEMMA, "smollm": SMOLLM, "deepseek": DEEPSEEK}
    found = [
        (f"{name}: {what}", template, messages, options)
        for name, template in every.items()
        for what, messages, options in (
            ("prompt", plain, PROMPT),
            ("turns", turns, PROMPT),
            ("no prompt", turns[:3], NOTHING),
            ("continued", turns[:3], GO_ON),
        )
    ]
    found += [
        (f"{name}: tools", template, tool_turns, {**PROMPT, "tools": TOOLS})
        for name, template in (("llama", LLAMA), ("qwen", QWEN), ("mistral", MISTRAL))
    ]
    return [
        *found,
        ("llama: date", LLAMA, plain, {**PROMPT, "date_string": "1 Jan 2030"}),
        ("llama: no tools", LLAMA, plain, {**PROMPT, "tools": []}),
        ("llama: two calls", LLAMA, [USER, {**CALLING, "tool_calls": CALLING["tool_calls"] * 2}], PROMPT),
        ("qwen: not thinking", QWEN, plain, {**PROMPT, "enable_thinking": False}),
        ("qwen: text and a call", QWEN, [USER, {**CALLING, "content": "Let me see."}], PROMPT),
        ("qwen: two results", QWEN, [*tool_turns, RESULT, AGAIN], PROMPT),
        ("qwen: a call continued", QWEN, [USER, {**CALLING, "content": "Let me"}], GO_ON),
        ("mistral: twice user", MISTRAL, [USER, USER], PROMPT),
        ("gemma: parts", GEMMA, [LISTED, ANSWER], NOTHING),
        ("gemma: parts continued", GEMMA, [USER, {**LISTED, "role": "assistant"}], GO_ON),
        ("gemma: twice user", GEMMA, [USER, USER], PROMPT),
        ("smollm: reasoning", SMOLLM, [USER, THOUGHT, {"role": "skip", "content": "x"}, AGAIN], PROMPT),
        ("smollm: not thinking", SMOLLM, [USER, THOUGHT], {**NOTHING, "enable_thinking": False}),
        ("smollm: xml tools", SMOLLM, plain, {**PROMPT, "xml_tools": TOOLS}),
        ("documents", DOCUMENTS, plain, {**PROMPT, "documents": [{"title": "T", "text": "x < y"}]}),
        ("no documents", DOCUMENTS, plain, PROMPT),
        ("only parts", PARTS, [LISTED], NOTHING),
        ("only parts continued", PARTS, [{**LISTED, "role": "assistant"}], GO_ON),
        ("deepseek: a thought continued", DEEPSEEK, [USER, {"role": "assistant", "content": "a</think>b "}], GO_ON),
    ]  # fmt: skip


def main() -> None:
    written = []
    for name, template, messages, options in cases():
        case: dict[str, Any] = {"name": name, "template": template, "messages": messages, "options": options}
        try:
            rendered, _ = render_jinja_template([messages], chat_template=template, **options, **SPECIAL)
            case["expected"] = rendered[0]
        except Exception as error:
            case["error"] = str(error)
        written.append(case)
    templates = sorted({case["template"] for case in written})
    for case in written:
        case["template"] = templates.index(case["template"])
    content = {
        "source": "transformers 5.24.0, render_jinja_template",
        "special_tokens": SPECIAL,
        "templates": templates,
        "cases": written,
    }
    OUTPUT.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
