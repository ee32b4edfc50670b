"""Callbacks: functions of the user that receive each row of the logs, and can end the run, in every topology.

Ready-made callbacks are at the end of the file: `rlframe.train(..., callbacks=[rlframe.StopAt(475)])`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import pathlib
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.errors import NoMethodError, PeerError, RlframeError, UsageError
from rlframe.learners import Checkpointer
from rlframe.metrics.rows import Values, on_host
from rlframe.programs.options import registry
from rlframe.programs.policies.evaluation import evaluate
from rlframe.programs.policies.saved import wait_until_saved
from rlframe.programs.policies.trained import TrainedPolicy, load
from rlframe.programs.run_dir.directory import RunDir

_log = logging.getLogger(__name__)

_END_TIMEOUT = 2.0  # seconds until a request to end the run fails; the caller repeats the request


@dataclasses.dataclass(frozen=True)
class CallbackInfo:
    """The argument of a callback: one row of the logs.

    Attributes:
        step: Environment steps so far. For a language model: learner steps.
        values: The row as a dict, name -> number. If it contains `return_mean`, it comes from an evaluation, and a
            checkpoint contains the evaluated policy.
        run_dir: The run directory.
        stop: Function `stop()` that ends the run early. The run still saves, evaluates and returns its result. Any
            thread can call it.
        save: Function `save()` that saves a checkpoint now, waits until it is written, and returns its name in
            `run_dir/checkpoints`. If it cannot be written, the run logs a warning, and the newest one is returned.
    """

    step: int
    values: dict[str, Any]
    run_dir: pathlib.Path
    stop: Callable[[], None] = dataclasses.field(repr=False, compare=False)
    save: Callable[[], int] = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def policy(self) -> TrainedPolicy:
        """The current policy, as `rlframe.load` returns it. The first use saves a checkpoint, and reads it."""
        return load(self.run_dir, self.save())


Callback = Callable[[CallbackInfo], Any]


class Callbacks:
    """A logger that calls each callback with each row, in the caller's process.

    If a callback raises, the run ends without an evaluation, and no callback is called again.

    Args:
        functions: The callbacks.

    Raises:
        UsageError: A callback cannot be called with one argument.

    Attributes:
        error: The exception that a callback raised. None means that no callback has raised.
    """

    def __init__(self, functions: Iterable[Callback]) -> None:
        if not isinstance(functions, Iterable):
            raise UsageError(
                f"callbacks must be a list of functions, got {functions!r}. Use callbacks=[{functions!r}]."
            )
        self._functions = list(functions)
        for function in self._functions:
            if not registry.takes(function, 1):
                raise UsageError(
                    f"A callback must take one argument, callback(info), with info.step, info.values and info.stop(). "
                    f"Got {function!r}."
                )
        self.error: BaseException | None = None
        self._stop_requested = self._warned = False
        self._end: Callable[[str, bool], None] | None = None
        self._saver: Any = None
        self._over = threading.Event()  # set at the end of the current program

    def __bool__(self) -> bool:
        """Return True if there are callbacks."""
        return bool(self._functions)

    def write(self, step: int, values: Values) -> None:
        """Call each callback with the row. If a callback raises, store the exception in `error`."""
        row = {name: _plain(value) for name, value in on_host(values).items()}
        for function in self._functions:
            if self.error is not None:
                return
            try:
                function(CallbackInfo(step, dict(row), self._run_dir, self._request_stop, self._save))
            except BaseException as error:  # `BaseException` includes SystemExit, which a thread would silently ignore
                self.error = error
                self.request_end()

    def close(self) -> None:
        """Do nothing."""

    def connect(self, node: Any, name: str, saver: Any, run_dir: pathlib.Path) -> None:
        """Set the nodes that receive requests to end the current program, and to save a checkpoint.

        Args:
            node: A node with a method `end(by, evaluate)`, or a handle to it.
            name: Name of the node, for messages.
            saver: A node with the methods `save_soon` and `stats` of a Learner, or a handle to it.
            run_dir: The run directory.
        """
        self._run_dir, self._over = run_dir, threading.Event()
        self._saver = handles.resolve(saver, "learner", stop=self._over)
        end = getattr(handles.resolve(node, name, deadline=_END_TIMEOUT), "end", None)
        if end is None:
            raise UsageError(
                f"Callbacks need a node {name} with a method end(by, evaluate), for example a Monitor. Got {node!r}."
            )
        self._end = end

    def disconnect(self) -> None:
        """Note the end of the program: its last checkpoint is the newest one, and no node can be called."""
        self._over.set()

    def request_end(self) -> None:
        """If a callback raised or called `stop()`, request the node to end the run.

        Call this repeatedly, because a restarted node loses the request.
        """
        if self._end is None or not (self.error is not None or self._stop_requested):
            return
        try:
            self._end("callback" if self.error is None else "error", self.error is None)
        except NoMethodError as error:
            if not self._warned:
                _log.warning("A callback cannot end the run: %s", error)
            self._warned = True
        except RlframeError:  # the node is being restarted, or the program has ended
            pass

    def _save(self) -> int:
        """See `CallbackInfo.save`. After the end of the program, return its last checkpoint."""
        checkpoints = RunDir(self._run_dir).checkpoints
        with contextlib.suppress(PeerError):  # the program has ended
            self._saver.save_soon()
            wait_until_saved(self._saver, checkpoints, self._over)
        return Checkpointer(checkpoints).existing(None)

    def _request_stop(self) -> None:
        self._stop_requested = True
        self.request_end()


def _plain(value: Any) -> Any:
    """Convert a logged value to a plain Python value. None becomes NaN, because `metrics.jsonl` stores NaN as null."""
    if value is None:
        return math.nan
    return value.tolist() if isinstance(value, np.ndarray) else value


class StopAt:
    """End the run when a value of its rows reaches a limit.

    Args:
        limit: the limit.
        metric: name of the value. `return_mean` is the mean return of an evaluation, and needs `eval_every`.
            `episode_return` is the mean return of the training episodes since the previous row.
        rows: number of consecutive rows with this value that must reach the limit.
    """

    def __init__(self, limit: float, metric: str = "return_mean", rows: int = 1) -> None:
        if rows < 1:
            raise UsageError(f"StopAt: rows must be at least 1, got {rows}.")
        self._limit, self._metric, self._rows = limit, metric, rows
        self._reached = 0  # number of consecutive rows that have reached the limit

    def __call__(self, info: CallbackInfo) -> None:
        """Read a row, and end the run if the limit is reached."""
        if (value := info.values.get(self._metric)) is None:
            return
        self._reached = self._reached + 1 if value >= self._limit else 0
        if self._reached >= self._rows:
            info.stop()


class EvaluateOn:
    """Evaluate the policy in another environment too, after each evaluation of the run.

    The run evaluates every `eval_every` steps and at its end. Another evaluation plays in this process. In a single
    process, training waits for it.

    Args:
        env: the environment, as for `rlframe.evaluate`. None means the run's environment, with other `env_kwargs`.
        env_kwargs: as for `rlframe.evaluate`.
        episodes: number of episodes in each evaluation.

    Attributes:
        rows: one dict for each evaluation: `step`, and the values of `rlframe.evaluate`.
    """

    def __init__(self, env: Any = None, *, env_kwargs: dict[str, Any] | None = None, episodes: int = 20) -> None:
        self._options = {"env": env, "env_kwargs": env_kwargs, "episodes": episodes}
        self.rows: list[dict[str, Any]] = []

    def __call__(self, info: CallbackInfo) -> None:
        """Evaluate if the row belongs to an evaluation of the run."""
        if "return_mean" in info.values:
            self.rows.append({"step": info.step, **evaluate(info.run_dir, **self._options)})
