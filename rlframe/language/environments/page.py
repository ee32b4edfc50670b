"""Groups as a page to read: one file that needs nothing else."""

from __future__ import annotations

import html
import json
import pathlib
from typing import Any

_HEAD = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --line: #8884; --good: #2a7d46; --bad: #b3362b; }}
@media (prefers-color-scheme: dark) {{ :root {{ --good: #5fc582; --bad: #f08a80; }} }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
details {{ border: 1px solid var(--line); border-radius: 6px; margin: .5rem 0; padding: .5rem .8rem; }}
summary {{ cursor: pointer; }}
article {{ border-top: 1px solid var(--line); margin-top: .7rem; padding-top: .5rem; }}
h3 {{ font-size: 1em; margin: 0; }}
.role {{ color: #888; font-size: .85em; margin: .5rem 0 0; }}
pre {{ font: inherit; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }}
.above {{ color: var(--good); }}
.below {{ color: var(--bad); }}
</style>
<h1>{title}</h1>
<p>{groups} groups, {sequences} sequences, mean score {mean:.4g}</p>
"""


def write_page(groups_file: pathlib.Path) -> pathlib.Path:
    """Writes the groups of a JSONL file as HTML beside it, and returns that file."""
    with open(groups_file, encoding="utf-8") as lines:
        groups = [json.loads(line) for line in lines]
    scores = [score for group in groups for score in group["scores"]]
    head = _HEAD.format(
        title=html.escape(groups_file.stem),
        groups=len(groups),
        sequences=len(scores),
        mean=sum(scores) / max(1, len(scores)),
    )
    page = groups_file.with_suffix(".html")
    page.write_text(head + "".join(_group(number, group) for number, group in enumerate(groups)), encoding="utf-8")
    return page


def _group(number: int, group: dict[str, Any]) -> str:
    scores, messages = group["scores"], group.get("messages") or []
    mean = sum(scores) / max(1, len(scores))
    sequences = "".join(
        f'<article><h3 class="{_kind(score)}">Score {score:g}</h3>'
        f"{_sequence(messages[index] if index < len(messages) else None)}</article>"
        for index, score in enumerate(scores)
    )
    title = f"Group {number}: mean score {mean:.4g}, best {max(scores, default=0):g}"
    return f"<details><summary>{title}</summary>{sequences}</details>\n"


def _sequence(messages: Any) -> str:
    if messages is None:
        return "<p>Its messages were not kept.</p>"
    if isinstance(messages, str):
        return f"<pre>{html.escape(messages)}</pre>"
    return "".join(
        f'<p class="role">{html.escape(str(message.get("role", "")))}</p>'
        f"<pre>{html.escape(_text(message.get('content')))}</pre>"
        for message in messages
    )


def _text(content: Any) -> str:
    """The text of a message, or of its parts; a part that is no text is named."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    return "" if content is None else str(content)


def _kind(score: float) -> str:
    return "above" if score > 0 else "below" if score < 0 else ""
