"""Callbacks: the caller's functions, which see each row of the logs and may end the run. The same in every topology."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.errors import NoMethodError, RlframeError, UsageError
from rlframe.metrics.base import Values, on_host
from rlframe.programs.options import registry

_log = logging.getLogger(__name__)

_ANSWER_WITHIN = 2.0  # seconds for a node to answer before it is asked again


@dataclasses.dataclass(frozen=True)
class CallbackInfo:
    """The argument of a callback: one row of the logs.

    Attributes:
        step: environment steps so far; of a language model, learner steps.
        values: the row, name -> number. A row with `return_mean` is that of an evaluation: the evaluated policy is
            saved already.
    """

    step: int
    values: dict[str, Any]
    _stop: Callable[[], None] = dataclasses.field(repr=False, compare=False)

    def stop(self) -> None:
        """End the run early: it saves, evaluates and returns its result. Any thread may call it, also later."""
        self._stop()


Callback = Callable[[CallbackInfo], Any]


class Callbacks:
    """A logger that calls callbacks with each row, in the caller's process.

    The first one that raises ends the run without an evaluation; none is called after that.

    Args:
        functions: the callbacks.

    Raises:
        UsageError: one of them cannot be called with one argument.

    Attributes:
        error: what a callback raised; None while none has.
    """

    def __init__(self, functions: Iterable[Callback]) -> None:
        if not isinstance(functions, Iterable):
            raise UsageError(f"callbacks is a list of functions, callbacks=[{functions!r}]; got {functions!r}.")
        self._functions = list(functions)
        for function in self._functions:
            if not registry.takes(function, 1):
                raise UsageError(
                    f"A callback takes one argument, callback(info), with info.step, info.values and info.stop(); got "
                    f"{function!r}."
                )
        self.error: BaseException | None = None
        self._stop_requested = self._warned = False
        self._end: Callable[[str, bool], None] | None = None

    def __bool__(self) -> bool:
        """Return True if there are callbacks."""
        return bool(self._functions)

    def write(self, step: int, values: Values) -> None:
        """Call them with a row. Nothing is raised: see `error`."""
        row = {name: _plain(value) for name, value in on_host(values).items()}
        for function in self._functions:
            if self.error is not None:
                return
            try:
                function(CallbackInfo(step, dict(row), self._request_stop))
            except BaseException as error:  # SystemExit too: in a thread nobody else would see it
                self.error = error
                self.request_end()

    def close(self) -> None:
        """Nothing is open."""

    def connect(self, node: Any, name: str) -> None:
        """Take the node that ends the program that runs now, or a handle to it.

        Args:
            node: an object with `end(by, evaluate)`.
            name: of the node, for messages.
        """
        end = getattr(handles.resolve(node, name, deadline=_ANSWER_WITHIN), "end", None)
        if end is None:
            raise UsageError(
                f"Callbacks need a {name} with a method end(by, evaluate), as a Monitor has; this one is {node!r}."
            )
        self._end = end

    def request_end(self) -> None:
        """Tell that node to end, if a callback asks for it. To be repeated: a node that was restarted has forgotten."""
        if self._end is None or not (self.error is not None or self._stop_requested):
            return
        try:
            self._end("callback" if self.error is None else "error", self.error is None)
        except NoMethodError as error:
            if not self._warned:
                _log.warning("A callback cannot end the run: %s", error)
            self._warned = True
        except RlframeError:  # it is being restarted, or the program is over
            pass

    def _request_stop(self) -> None:
        self._stop_requested = True
        self.request_end()


def _plain(value: Any) -> Any:
    """A value as `metrics.jsonl` gives it back, where a number that is not finite is null."""
    if value is None:
        return math.nan
    return value.tolist() if isinstance(value, np.ndarray) else value
