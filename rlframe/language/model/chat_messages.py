"""Convert the messages of a chat to dicts. They can be dicts, or objects of the `openai` package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlframe.errors import UsageError


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Convert messages to dicts. Drop fields of objects that are None, except `content`.

    If a message with tool calls has no `content`, its `content` becomes None.

    Raises:
        UsageError: A message has another type, or no role.
    """
    return [_plain(i, message) for i, message in enumerate(messages)]


def _plain(index: int, message: Any) -> dict[str, Any]:
    if isinstance(message, Mapping):
        fields = {name: _parts(value) for name, value in message.items()}
        if fields.get("tool_calls"):
            fields = {**fields, "content": fields.get("content")}
    elif hasattr(message, "model_dump"):
        fields = {"content": None, **message.model_dump(exclude_none=True)}
    else:
        raise UsageError(
            f"messages[{index}] must be a dict with role and content, or a message of the openai package, such as "
            f"answer.choices[0].message; got {type(message).__name__}."
        )
    if "role" not in fields:
        raise UsageError(f"messages[{index}] has no role. Its fields: {', '.join(fields) or 'none'}.")
    return fields


def _parts(value: Any) -> Any:
    """Convert the objects in a list, such as tool_calls, to dicts. Return other values unchanged."""
    if not isinstance(value, list):
        return value
    return [one.model_dump(exclude_none=True) if hasattr(one, "model_dump") else one for one in value]


def join_text_parts(content: Any) -> Any:
    """Join a list of text parts to one text. Return other values unchanged."""
    if not isinstance(content, list) or not all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return content
    return "".join(part["text"] for part in content)
