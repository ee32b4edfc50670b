"""Loggers of a run's metrics: terminal, files, TensorBoard, experiment trackers, callbacks and plots.

Training rows contain `episode_return`, `episode_length`, `steps_per_second`, `staleness` and the agent's logs.
Evaluation rows contain `return_mean`, `return_std` and `eval_episodes`. The step is always counted in environment
steps.

From counters to a plot: `ActorCounts` (rows.py) sums the counters of all actors, and `Rows.next` makes a row from the
changes since the previous row. A `MultiLogger` fetches the row from the device, and calls `write(step, row)` of each
logger. For example, `JSONLLogger` appends the row to `metrics.jsonl`. Later, `plot_learning_curve` reads the
`metrics.jsonl` of several runs (curves.py), averages runs that differ only in their seed, and draws the curves
(plots.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframe.extras import lazy_names
from rlframe.metrics.files import CSVLogger, JSONLLogger, read_jsonl
from rlframe.metrics.rows import CallbackLogger, LenientLogger, Logger, MultiLogger, ProgressDisplay
from rlframe.metrics.terminal import TerminalLogger
from rlframe.metrics.trackers import TensorBoardLogger, TrackioLogger, WandbLogger

if TYPE_CHECKING:
    from rlframe.metrics.plots import plot_learning_curve

__all__ = [
    "CSVLogger",
    "CallbackLogger",
    "JSONLLogger",
    "LenientLogger",
    "Logger",
    "MultiLogger",
    "ProgressDisplay",
    "TensorBoardLogger",
    "TerminalLogger",
    "TrackioLogger",
    "WandbLogger",
    "plot_learning_curve",
    "read_jsonl",
]

__getattr__, __dir__ = lazy_names(__name__, {"plot_learning_curve": "rlframe.metrics.plots"})
