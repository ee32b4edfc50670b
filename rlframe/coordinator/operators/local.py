"""Workers as processes of this machine: the default."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Mapping
from typing import TextIO

from rlframe.coordinator.messages import ROLES, Role, worker_id_of
from rlframe.coordinator.operators.supervised import BACKOFF, SupervisedOperator
from rlframe.engines.base import MakeWorker
from rlframe.engines.group_rules import ON_CPU, GroupRules
from rlframe.engines.logs import NodeLogs
from rlframe.engines.served_engine import pickle_worker
from rlframe.engines.supervision.node_main import run_served_node
from rlframe.engines.supervision.nodes import StartableProcess, pickle_node
from rlframe.engines.supervision.supervisor import Backoff
from rlframe.interprocess.heartbeat import TIMEOUT
from rlframe.transport.sockets import SocketDirectory, SocketTransport

WorkerEnv = Mapping[str, "str | None"]  # environment variables; None: removed

# The accelerators, and more than one thread, are the learner's.
ENV: Mapping[str, WorkerEnv] = {role: {} if role == "learner" else ON_CPU for role in ROLES}

_TRANSPORT = SocketTransport()


class LocalOperator(SupervisedOperator):
    """Runs workers as processes of this machine. See `Operator`.

    They are called over sockets that only their user can reach.

    Args:
        makers: by role, makes a worker in its process: called with (worker_id, index, incarnation).
        env: by role, environment variables beside this process's own (None: removed); a role that is missing has those
            of `ENV`.
        output: where the workers' lines go; stderr.
        logs: the directory in which they are kept as well, in `ROLE-INDEX.log`; None: nowhere.
        hang_timeout, backoff: see `Supervisor`.

    Raises:
        UsageError: a maker cannot be pickled.
    """

    def __init__(
        self,
        makers: Mapping[Role, MakeWorker],
        *,
        env: Mapping[str, WorkerEnv] | None = None,
        output: TextIO | None = None,
        logs: pathlib.Path | None = None,
        hang_timeout: float = TIMEOUT,
        backoff: Backoff = BACKOFF,
    ) -> None:
        rules = {role: GroupRules(env=variables) for role, variables in {**ENV, **(env or {})}.items()}
        for role, make in makers.items():
            pickle_node(role, make)  # a maker that cannot be pickled is an error here
        self._sockets = SocketDirectory()
        super().__init__(
            {role: functools.partial(self._node, role, make, rules[role]) for role, make in makers.items()},
            _TRANSPORT,
            f"{self._sockets.path}/operator",
            logs=NodeLogs(logs, output),
            hang_timeout=hang_timeout,
            backoff=backoff,
        )

    def close(self) -> None:
        """See `Operator`."""
        super().close()
        self._sockets.close()

    def _node(self, role: Role, make: MakeWorker, rules: GroupRules, index: int, incarnation: int) -> StartableProcess:
        name, address = worker_id_of(role, index), f"{self._sockets.path}/{role}-{index}-{incarnation}"
        # Now: addresses of Launchpad that the maker holds are known only when the program runs.
        pickled = pickle_worker(_TRANSPORT, address, pickle_node(role, make), name, index, incarnation)
        return StartableProcess.of(name, _run_worker, pickled, rules, address)


def _run_worker(pickled: bytes) -> None:
    run_served_node(pickled, end=lambda: None)  # a worker does not end the program
