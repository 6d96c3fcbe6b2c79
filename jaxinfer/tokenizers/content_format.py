"""Whether a chat template reads a message's content as one text or as a list of parts."""

from dataclasses import dataclass
from typing import Any

from jinja2 import nodes


@dataclass(frozen=True)
class ContentFormat:
    """How content is given to a template.

    Attributes:
        lists: content that came as a list of parts stays one; else its texts are joined.
        only_lists: content that came as text is made a list of one part.
    """

    lists: bool
    only_lists: bool

    @classmethod
    def named(cls, name: str) -> "ContentFormat":
        """vLLM's names: "string" or "openai".

        Raises:
            ValueError: another name.
        """
        if name not in ("string", "openai"):
            raise ValueError(f"chat_template_content_format={name!r} must be 'auto', 'string' or 'openai'")
        return cls(lists=name == "openai", only_lists=name == "openai")


def content_format_of(template: nodes.Template) -> ContentFormat:
    """What the source asks for: lists if it loops over `content`, and texts too if it asks what is a string."""
    names = {
        assign.target.name
        for assign in template.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, set())
    }
    lists = any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))
    asks = any(test.name == "string" for test in template.find_all(nodes.Test))
    return ContentFormat(lists=lists, only_lists=lists and not asks)


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its text as a list of parts; none for an empty text."""
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "text", "text": content}] if content else []
    return message | {"content": content}
