"""Chat templates: conversations to text, by Jinja templates that come with models and are therefore not trusted.

The environment is what Hugging Face's `apply_chat_template` gives to templates: block trimming, loop controls,
`raise_exception`, `strftime_now`, an unescaped `tojson`, and the `generation` tag, which renders its body.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxinfer.tokenizers.messages import check_messages

# Appended to the message to be continued. The blank at its end shows whether the template strips messages.
_CUT_MARK = "\ue000continue-here\ue000 "


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}...{% endgeneration %}`` marks what the assistant wrote, for training; here only shown."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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


def _compile(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
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
            kwargs: further variables for the template, such as `documents` or `enable_thinking`.

        Raises:
            ValueError: no template; the template failed or refused, with its message; a malformed message; both
                `add_generation_prompt` and `continue_final_message`.
        """
        if add_generation_prompt and continue_final_message:
            raise ValueError(
                "add_generation_prompt=True opens a new turn and continue_final_message=True goes on with the last one;"
                " set one of them to False"
            )
        conversation = check_messages(messages)
        template = self._compiled(self._choose(chat_template, has_tools=bool(tools)))
        if continue_final_message:
            conversation[-1]["content"] += _CUT_MARK
        variables = {
            **self._special_tokens,
            "documents": None,
            **kwargs,
            "messages": conversation,
            "tools": list(tools) if tools is not None else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = template.render(variables)
        except Exception as error:  # a template can raise anything: it computes with whatever the caller passed
            raise ValueError(f"the chat template failed on these messages: {error}") from error
        return _cut(text) if continue_final_message else text

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


def _cut(text: str) -> str:
    mark = _CUT_MARK.rstrip()
    end = text.rfind(mark)
    if end < 0:
        raise ValueError(
            "continue_final_message=True, but the chat template does not print the last message's content;"
            " nothing can be continued with it"
        )
    return text[:end] if text.startswith(_CUT_MARK, end) else text[:end].rstrip()
