"""Write the files of an environment: groups as JSON lines or an HTML page, checkpoints, and results of evaluations."""

from __future__ import annotations

import html
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from rlframe.errors import CheckpointError
from rlframe.interprocess.files import write_atomically

_CHECKPOINTS = "env_checkpoints"  # folder in the trainer's checkpoint_dir, named as in `atroposlib`


class GroupsFile:
    """A JSONL file with one group per line.

    The first `write` creates the file. If a file with this name exists, a number is appended to the new file's name.
    """

    def __init__(self, path: str) -> None:
        self.path = pathlib.Path(path)
        self._file: IO[str] | None = None

    def write(self, group: Mapping[str, Any]) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            wanted, number = self.path, 0
            while self._file is None:
                try:
                    self._file = open(self.path, "x", encoding="utf-8")  # noqa: SIM115
                except FileExistsError:
                    number += 1
                    self.path = wanted.with_stem(f"{wanted.stem}_{number}")
        self._file.write(to_json(group) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def save_checkpoint(checkpoint_dir: str, name: str, step: int, data: Mapping[str, Any]) -> pathlib.Path:
    """Write the environment's data for a step to a file, atomically."""
    path = pathlib.Path(checkpoint_dir, _CHECKPOINTS, name, f"step-{step}.json")
    write_atomically(path, to_json(data), parents=True)
    return path


def load_checkpoint(checkpoint_dir: str, name: str, step: int) -> dict[str, Any]:
    """Return the newest saved data that is not after this step; {} if there is none.

    Raises:
        CheckpointError: The file cannot be read.
    """
    folder = pathlib.Path(checkpoint_dir, _CHECKPOINTS, name)
    saved = {int(path.stem[5:]): path for path in folder.glob("step-*.json") if path.stem[5:].isdigit()}
    at = max((one for one in saved if one <= step), default=None)
    if at is None:
        return {}
    try:
        return json.loads(saved[at].read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"The checkpoint {saved[at]} of an environment cannot be read: {error}.") from error


def write_evaluation(
    folder: str, result: Mapping[str, Any], samples: Sequence[Mapping[str, Any]] | None
) -> pathlib.Path:
    """Write an evaluation's `metrics.json` and, if there are samples, `samples.jsonl`."""
    path = pathlib.Path(folder, "metrics.json")
    write_atomically(path, to_json(result, indent=2), parents=True)
    if samples:
        lines = "".join(to_json(sample) + "\n" for sample in samples)
        write_atomically(path.with_name("samples.jsonl"), lines)
    return path


def to_json(content: Any, indent: int | None = None) -> str:
    """Encode a value as JSON. Numpy numbers and arrays become numbers and lists; other unknown objects become text."""
    return json.dumps(content, default=_plain, indent=indent, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if hasattr(value, "model_dump"):  # for example, a message of the openai package
        return value.model_dump(exclude_none=True)
    return value.item() if isinstance(value, np.generic) else str(value)


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
    """Write the groups of a JSONL file as an HTML page next to it. Return the page's path."""
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
        f'<article><h3 class="{_css_class(score)}">Score {score:g}</h3>'
        f"{_sequence(messages[index] if index < len(messages) else None)}</article>"
        for index, score in enumerate(scores)
    )
    title = f"Group {number}: mean score {mean:.4g}, best {max(scores, default=0):g}"
    return f"<details><summary>{title}</summary>{sequences}</details>\n"


def _sequence(messages: Any) -> str:
    if messages is None:
        return "<p>The messages were not saved.</p>"
    if isinstance(messages, str):
        return f"<pre>{html.escape(messages)}</pre>"
    return "".join(
        f'<p class="role">{html.escape(str(message.get("role", "")))}</p>'
        f"<pre>{html.escape(_text(message.get('content')))}</pre>"
        for message in messages
    )


def _text(content: Any) -> str:
    """Return the text of a message or of its parts. A part without text is replaced by the part's type."""
    if isinstance(content, list):
        return "\n".join(str(part.get("text") or f"[{part.get('type')}]") for part in content)
    return "" if content is None else str(content)


def _css_class(score: float) -> str:
    return "above" if score > 0 else "below" if score < 0 else ""
