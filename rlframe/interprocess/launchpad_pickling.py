"""Pickle the nodes of plain `lp.launch`: this is the only code of ours that runs in its launcher.

- The process of each node calls `restore` first, which starts its guard.
- A node is refused where its handle is expected. (Launchpad makes our objects in the nodes' processes.)
- When the program stops, the launcher ends nodes that still import.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from rlframe import extras
from rlframe.errors import UsageError
from rlframe.interprocess.launchpad_guard import end_starting_nodes
from rlframe.interprocess.launchpad_node import start_guard_in_node
from rlframe.interprocess.processes import ProcessId, this_process

_WAITS = "rlframe: waits for lp.launch to start nodes"  # a thread
_LAUNCHES_WITHIN = 60.0  # seconds from the pickling of a node to the start of nodes
_LOOK = 0.1  # seconds


def register(kind: Any) -> None:
    """Give Launchpad's class of nodes, and so its subclasses, a `__reduce_ex__`."""
    kind.__reduce_ex__ = _reduce


def _reduce(node: Any, protocol: Any) -> tuple[Any, ...]:
    if not any(thread.name == _WAITS for thread in threading.enumerate()):
        threading.Thread(target=_end_starting_nodes_at_stop, name=_WAITS, daemon=True).start()
    _refuse_arguments(node)
    reduced: Any = object.__reduce_ex__(node, protocol)
    make, arguments, *rest = reduced
    if rest and isinstance(rest[0], dict) and not isinstance(node._function, ReportedExit):
        rest[0] = {**rest[0], "_function": ReportedExit(node._function)}
    return restore, (this_process(), os.getsid(0), make, *arguments), *rest


def _end_starting_nodes_at_stop() -> None:
    """Make the launcher kill nodes that still ignore SIGTERM, each time it sends SIGTERM to them.

    On a busy machine they may do so for longer than Launchpad waits.
    """
    manager, end = sys.modules["launchpad.launch.worker_manager"], time.monotonic() + _LAUNCHES_WITHIN
    while time.monotonic() < end:
        # Launchpad itself must be the first that registers a handler: only then does it take over SIGINT for its nodes.
        if signal.SIGUSR1 in (manager._SIGNAL_HANDLERS or ()):
            manager.register_stop_handler(_end_starting_nodes)
            return
        time.sleep(_LOOK)


def _end_starting_nodes() -> None:
    end_starting_nodes(os.getpid())
    # Register it again: Launchpad forgets handlers that it has called.
    sys.modules["launchpad.launch.worker_manager"].register_stop_handler(_end_starting_nodes)


def restore(launcher: ProcessId, session: int, make: Callable[..., Any], *arguments: Any) -> Any:
    """Start the guard and make a node without its state."""
    start_guard_in_node(launcher, session)
    return make(*arguments)


class ReportedExit:
    """The function of a node, whose `sys.exit` with a code that is not 0 is reported as an exception is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._function(*args, **kwargs)
        except SystemExit as error:
            if error.code not in (None, 0):
                sys.excepthook(SystemExit, error, error.__traceback__)
            raise


def refuse_nodes(given: Any, where: str) -> None:
    """Raise UsageError for a Launchpad node: its handle is expected.

    Args:
        given: may be a node, or hold one: in lists, tuples, dicts and arguments of `functools.partial`.
        where: the end of the message, such as "to Actor" or "as the learner".
    """
    if extras.is_instance(given, "launchpad.nodes.base", "Node"):
        kind = type(given).__name__
        raise UsageError(f"A {kind} was given {where}: give the handle that program.add_node(node) returns.")
    held: Iterable[Any] = ()
    if type(given) is functools.partial:
        held = (given.args, given.keywords)
    elif type(given) is dict:
        held = given.values()
    elif type(given) is list or isinstance(given, tuple):
        held = given
    for each in held:
        refuse_nodes(each, where)


def _refuse_arguments(node: Any) -> None:
    """Refuse nodes that are given to an object of ours."""
    made_by: Any = getattr(node, "_constructor", None)
    while isinstance(made_by, functools.partial):
        made_by = made_by.func
    if any(kind.__module__.startswith("rlframe.") for kind in getattr(made_by, "__mro__", ())):
        refuse_nodes((node._constructor, node._args, node._kwargs), f"to {made_by.__name__}")
