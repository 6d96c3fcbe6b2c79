"""Chat templates: conversations to text, by Jinja templates that come with models and are therefore not trusted.

The environment is what Hugging Face's `apply_chat_template` gives to templates: block trimming, loop controls,
`raise_exception`, `strftime_now`, an unescaped `tojson`, and the `generation` tag, which renders its body.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxinfer.tokenizers.content_format import ContentFormat, content_format_of, in_parts
from jaxinfer.tokenizers.messages import check_dicts, check_messages, plain_data

# Appended to the message to be continued. The blank at its end shows whether the template strips messages.
_CUT_MARK = "\ue000continue-here\ue000 "


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the assistant wrote, for training; here only shown."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)  # what is set inside is not seen outside


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@dataclass(frozen=True)
class _Template:
    """A compiled template, and how it wants `content`."""

    compiled: jinja2.Template
    content_format: ContentFormat


def _compile(source: str) -> _Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return _Template(environment.from_string(source), content_format_of(environment.parse(source)))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"the chat template does not parse: line {error.lineno}: {error.message}") from error


class ChatTemplates:
    """The templates of one model.

    Args:
        templates: by name; "default" is the one used, "tool_use" instead of it when tools are given.
        special_tokens: variables such as ``bos_token`` that templates may print.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._compiled = functools.lru_cache(maxsize=16)(_compile)

    @property
    def default(self) -> str | None:
        """Source of the default template; a model with a single template has it, whatever its name."""
        if len(self._templates) == 1:
            return next(iter(self._templates.values()))
        return self._templates.get("default")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_content_format: str = "auto",
        **kwargs: Any,
    ) -> str:
        """Renders one conversation.

        Args:
            messages: dicts with `role` and `content` (text, a list of text parts, or None), and what else the
                template knows, as `tool_calls` whose arguments may be a JSON string.
            chat_template: source of a template, or the name of one of the model's; None chooses the model's own.
            add_generation_prompt: end with the header of the assistant's turn.
            continue_final_message: end inside the last message, so that generating goes on with it.
            tools: JSON schemas of functions the model may call.
            documents: dicts with, usually, `title` and `text`, for templates that show them.
            chat_template_content_format: "string" joins text parts to one text, "openai" gives the template lists of
                parts, "auto" does what the template's own source asks for.
            kwargs: further variables for the template, such as `enable_thinking`.

        Raises:
            ValueError: no template; the template failed or refused, with its message; a malformed message; both
                `add_generation_prompt` and `continue_final_message`; or the template does not print the last message
                as it is, so that it cannot be continued.
            TypeError: an argument of the wrong type, or a value that is not plain data.
        """
        _check_end(add_generation_prompt, continue_final_message)
        template = self._compiled(self._choose(chat_template, has_tools=tools is not None))
        form = template.content_format
        if chat_template_content_format != "auto":
            form = ContentFormat.named(chat_template_content_format)
        conversation = check_messages(messages, parts=form.lists)
        if form.only_lists:
            conversation = [in_parts(message) for message in conversation]
        last = _mark(conversation[-1]) if continue_final_message else ""
        variables = {
            **self._special_tokens,
            **plain_data(kwargs, "chat_template_kwargs"),
            "documents": None if documents is None else check_dicts(documents, "documents"),
            "messages": conversation,
            "tools": None if tools is None else check_dicts(tools, "tools"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = template.compiled.render(variables)
        except Exception as error:  # a template can raise anything: it computes with whatever the caller passed
            raise ValueError(f"the chat template failed on these messages: {error}") from error
        return _cut(text, last) if continue_final_message else text

    def _choose(self, chat_template: str | None, *, has_tools: bool) -> str:
        if chat_template is not None:
            return self._templates.get(chat_template, chat_template)
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        source = self.default
        if source is None:
            names = sorted(self._templates)
            which = f" by default; it has {names}, choose one with chat_template=" if names else ""
            raise ValueError(f"the model has no chat template{which}, or pass chat_template=, or use generate()")
        return source


def _check_end(add_generation_prompt: bool, continue_final_message: bool) -> None:
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "add_generation_prompt=True opens a new turn and continue_final_message=True goes on with the last one;"
            " set one of them to False"
        )
    if not isinstance(continue_final_message, bool):
        raise TypeError(f"continue_final_message={continue_final_message!r} must be True or False")


def _mark(message: dict[str, Any]) -> str:
    """Appends the mark to the message's text, and returns the text, or its last part."""
    content = message["content"]
    if not content:
        message["content"] = _CUT_MARK if isinstance(content, str) else [{"type": "text", "text": _CUT_MARK}]
        return ""
    if isinstance(content, str):
        message["content"] += _CUT_MARK
        return content
    text: str = content[-1]["text"]
    content[-1]["text"] += _CUT_MARK
    return text


def _cut(text: str, last: str) -> str:
    mark = _CUT_MARK.rstrip()
    end = text.rfind(mark)
    if end < 0 or last.strip() not in text:
        raise ValueError(
            "continue_final_message=True, but the chat template does not print the last message's content as it is;"
            " nothing can be continued with it"
        )
    return text[:end] if text.startswith(_CUT_MARK, end) else text[:end].rstrip()
