"""Pickle the nodes of plain `lp.launch`: this is the only code of ours that runs in its launcher.

- The process of each node imports rlframe first, which starts its guard.
- A node that was given where its handle is expected is refused. (Launchpad makes our objects in the nodes' processes.)
- When the program stops, the launcher ends nodes that still import.
"""

from __future__ import annotations

import copyreg
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from rlframe.errors import UsageError
from rlframe.interprocess.launchpad_guard import end_starting_nodes

_WAITS = "rlframe: waits for lp.launch to start nodes"  # a thread
_LAUNCHES_WITHIN = 60.0  # seconds from the pickling of a node to the start of nodes
_LOOK = 0.1  # seconds


def register() -> None:
    """Register a reducer for each class of nodes, as Launchpad registers its own. Launchpad has been imported."""
    kinds = [sys.modules["launchpad.nodes.python.node"].PyNode]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in kinds:
        copyreg.pickle(kind, _reduce)


def _reduce(node: Any) -> tuple[Any, ...]:
    register()  # again: a class such as ReverbNode is imported when it is first used
    if not any(thread.name == _WAITS for thread in threading.enumerate()):
        threading.Thread(target=_end_starting_nodes_at_stop, name=_WAITS, daemon=True).start()
    _refuse_nodes(node)
    make, arguments, state, *rest = node.__reduce_ex__(4)
    return restore, (make, *arguments), {**state, "_function": ReportedExit(node._function)}, *rest


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


def restore(make: Callable[..., Any], *arguments: Any) -> Any:
    """Make a node without its state. Unpickled by name: this import of rlframe has started the guard."""
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


def _refuse_nodes(node: Any) -> None:
    """Raise UsageError if an object of ours gets a node, in place of its handle."""
    constructor: Any = getattr(node, "_constructor", None)
    given: list[Any] = []
    if constructor is not None:
        given += [*node._args, *node._kwargs.values()]
    while isinstance(constructor, functools.partial):
        given += [*constructor.args, *constructor.keywords.values()]
        constructor = constructor.func
    is_ours = any(kind.__module__.startswith("rlframe.") for kind in getattr(constructor, "__mro__", ()))
    given += [one for each in given if type(each) in (list, tuple) for one in each]
    for each in given:
        if is_ours and isinstance(each, sys.modules["launchpad.nodes.base"].Node):
            kind = type(each).__name__
            raise UsageError(
                f"A {kind} was given to {constructor.__name__}: give the handle that program.add_node(node) returns."
            )
