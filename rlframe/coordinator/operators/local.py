"""The default operator, which runs workers as processes of this machine."""

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

WorkerEnv = Mapping[str, "str | None"]  # environment variables; None removes a variable

# Only the learner uses accelerators and more than one thread.
ENV: Mapping[str, WorkerEnv] = {role: {} if role == "learner" else ON_CPU for role in ROLES}

_TRANSPORT = SocketTransport()


class LocalOperator(SupervisedOperator):
    """An operator that runs workers as processes of this machine. See `Operator`.

    The workers' sockets are accessible only to the current user.

    Args:
        makers: For each role, a function of (worker_id, index, incarnation) that returns a worker. The operator calls
            it in the worker's process.
        env: For each role, additional environment variables of the workers; None removes a variable. The default for a
            role is `ENV[role]`.
        output: Stream for the workers' output. The default is stderr.
        logs: Directory for a copy of the output, in `ROLE-INDEX.log`. None writes no copy.
        hang_timeout, backoff: See `Supervisor`.

    Raises:
        UsageError: A maker cannot be pickled.
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
            pickle_node(role, make)  # if a maker cannot be pickled, raise now, not at the first start
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
        # Pickle only now, because Launchpad addresses in the maker cannot be resolved before the program runs.
        pickled = pickle_worker(_TRANSPORT, address, pickle_node(role, make), name, index, incarnation)
        return StartableProcess.of(name, _run_worker, pickled, rules, address)


def _run_worker(pickled: bytes) -> None:
    run_served_node(pickled, end=lambda: None)  # the end of a worker does not end the program
