"""Test that each message on the page docs/howto/errors.md still exists in the code."""

from __future__ import annotations

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/howto/errors.md"
MESSAGES = re.findall(r"^### `(.+)`$", PAGE.read_text(), re.MULTILINE)


def template(node: ast.JoinedStr | ast.Constant) -> str:
    """Return the text of a string in the code. A `…` stands for each value that is inserted."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in parts)


@pytest.fixture(scope="module")
def texts() -> str:
    """Return all strings in the code, each on its own line."""
    found = []
    for path in (ROOT / "rlframe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                found.append(re.sub(r"%\w", "…", template(node)).replace("\n", " "))
    return "\n".join(found)


def test_page_has_about_twenty_messages():
    assert 20 <= len(MESSAGES) == len({*MESSAGES})


@pytest.mark.parametrize("message", MESSAGES)
def test_message_exists_in_the_code(message, texts):
    pattern = ".*".join(re.escape(part) for part in message.split("…"))
    assert re.search(pattern, texts), f"{message!r} is in {PAGE.name}, but no message in rlframe/ has this form."
