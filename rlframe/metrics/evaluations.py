"""The row that a log has of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def evaluation_row(values: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of `Evaluator.evaluate` under their names in the logs.

    `episodes` becomes `eval_episodes`: in a log, `episodes` is the number of training episodes.
    """
    names = ("return_mean", "return_std", "length_mean")
    return {**{name: values[name] for name in names}, "eval_episodes": values["episodes"]}
