"""What an environment writes: groups as JSON lines, checkpoints, results of evaluations."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import IO, Any

import numpy as np

from rlframe.errors import CheckpointError
from rlframe.interprocess.files import write_atomically

_CHECKPOINTS = "env_checkpoints"  # in the trainer's checkpoint_dir, as published


class GroupsFile:
    """A JSONL file with a group in each line. Opened at the first one, under a name that no file has yet."""

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
    """Writes the data for a step, whole or not at all."""
    path = pathlib.Path(checkpoint_dir, _CHECKPOINTS, name, f"step-{step}.json")
    write_atomically(path, to_json(data), parents=True)
    return path


def load_checkpoint(checkpoint_dir: str, name: str, step: int) -> dict[str, Any]:
    """The newest data of this step or before it; empty where there is none.

    Raises:
        CheckpointError: the file cannot be read.
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
    """`metrics.json` and, where there are samples, `samples.jsonl`."""
    path = pathlib.Path(folder, "metrics.json")
    write_atomically(path, to_json(result, indent=2), parents=True)
    if samples:
        lines = "".join(to_json(sample) + "\n" for sample in samples)
        write_atomically(path.with_name("samples.jsonl"), lines)
    return path


def to_json(content: Any, indent: int | None = None) -> str:
    """JSON, of numpy's numbers and arrays too; what JSON has no word for is written as text."""
    return json.dumps(content, default=_plain, indent=indent, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    return value.item() if isinstance(value, np.generic) else str(value)
