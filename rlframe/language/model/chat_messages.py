"""Messages of a chat: dicts, or objects of the `openai` package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlframe.errors import UsageError


def plain_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Return messages as dicts. Fields of an object that are null are left out, but for `content`.

    A message that calls tools may come without `content`: it is null then.

    Raises:
        UsageError: a message is neither, or has no role.
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
        raise UsageError(f"messages[{index}] has no role: it has {', '.join(fields) or 'no fields'}.")
    return fields


def _parts(value: Any) -> Any:
    """The value of a field; in a list, such as tool_calls, objects become dicts."""
    if not isinstance(value, list):
        return value
    return [one.model_dump(exclude_none=True) if hasattr(one, "model_dump") else one for one in value]


def join_text_parts(content: Any) -> Any:
    """Join a list of text parts, as the policy server does. Return anything else as it is."""
    if not isinstance(content, list) or not all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return content
    return "".join(part["text"] for part in content)
