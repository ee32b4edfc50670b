"""Loggers of a run's numbers: the terminal, files, TensorBoard, trackers, a function of yours, a picture.

Rows of training carry `episode_return`, `episode_length`, `steps_per_second`, `staleness` and the agent's logs;
rows of evaluation carry `return_mean`, `return_std` and `eval_episodes`. The step is always in environment steps.

One row: `ActorCounts` (rows.py) adds up what all actors counted, and `Rows.next` returns the changes since the row
before. A `MultiLogger` fetches it from the device, and calls `write(step, row)` of each logger: `JSONLLogger` appends
it to `metrics.jsonl`. Later, `plot_learning_curve` reads that file of several runs (curves.py), averages those that
differ by their seed alone, and draws them (plots.py).
"""

from __future__ import annotations

from rlframe.metrics.base import CallbackLogger, LenientLogger, Logger, MultiLogger
from rlframe.metrics.files import CSVLogger, JSONLLogger, read_jsonl
from rlframe.metrics.plots import plot_learning_curve
from rlframe.metrics.terminal import TerminalLogger
from rlframe.metrics.trackers import TensorBoardLogger, TrackioLogger, WandbLogger

__all__ = [
    "CSVLogger",
    "CallbackLogger",
    "JSONLLogger",
    "LenientLogger",
    "Logger",
    "MultiLogger",
    "TensorBoardLogger",
    "TerminalLogger",
    "TrackioLogger",
    "WandbLogger",
    "plot_learning_curve",
    "read_jsonl",
]
