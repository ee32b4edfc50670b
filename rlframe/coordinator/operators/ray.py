"""Workers as actors of a Ray cluster: one named, detached actor for each incarnation.

Ray places and starts it; its calls go by the operator's transport, so that the coordinator calls every worker in one
way, and a worker that is busy cannot keep a ping waiting in an actor's queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import threading
from collections.abc import Mapping
from typing import Any

import cloudpickle

from rlframe import extras
from rlframe.coordinator.messages import WorkerHealth, WorkerInfo, WorkerKey
from rlframe.coordinator.operators.base import OperatorError
from rlframe.coordinator.workers.process import SILENCE, Life, WorkerEnd, WorkerServer
from rlframe.coordinator.workers.records import MakeWorker
from rlframe.errors import UsageError
from rlframe.transport import DEFAULT, Transport

with extras.needed("RayOperator", "ray"):
    import ray

Options = Mapping[str, Any]  # of an actor: num_cpus, num_gpus, resources, runtime_env, ...


class RayOperator:
    """Creates, finds and kills actors. `ray.init` is the caller's: it says which cluster. See `Operator`.

    Args:
        run: the name of the run, by which its actors are told from others.
        workers: by role, what makes a worker.
        options: by role, the actors' options; a role that is missing has one CPU, the learner all that Ray gives it.
        silence: seconds without a call after which a worker ends.
    """

    transport: Transport = DEFAULT
    every, grace, starts = 0.5, 8.0, True

    def __init__(
        self,
        run: str,
        workers: Mapping[str, MakeWorker],
        options: Mapping[str, Options] | None = None,
        *,
        silence: float = SILENCE,
    ) -> None:
        if not run:
            raise UsageError("The run needs a name, by which its actors are told from others.")
        self._namespace = f"rlframe-{run}"
        self._makers = {role: cloudpickle.dumps(maker) for role, maker in workers.items()}
        self._options, self._silence = options or {}, silence
        self._known: dict[WorkerKey, _Known] = {}

    def list(self) -> list[WorkerInfo]:
        """See `Operator`."""
        with _reaching_ray():
            actors = ray.util.list_named_actors(all_namespaces=True)
            names = [actor["name"] for actor in actors if actor["namespace"] == self._namespace]
            seen = [one for one in map(self._seen, names) if one is not None]
        keys = {one.key for one in seen}
        self._known = {key: known for key, known in self._known.items() if key in keys}
        return seen

    def start(self, worker: WorkerInfo) -> None:
        """See `Operator`."""
        if worker.role not in self._makers:
            raise UsageError(f"There are no workers of the role {worker.role!r}, only {', '.join(self._makers)}.")
        options = {"num_cpus": 1, **self._options.get(worker.role, {})}
        actor = ray.remote(_WorkerActor).options(
            **options,
            name=f"{worker.role}-{worker.index}-{worker.incarnation}",
            namespace=self._namespace,
            lifetime="detached",  # it outlives the coordinator
            max_restarts=0,  # that is the coordinator's, which counts incarnations
            max_concurrency=2,  # `end` while `where` waits
        )
        arguments = (self._makers[worker.role], worker.worker_id, worker.index, worker.incarnation, self._silence)
        # It is there: an earlier call had been heard.
        with _reaching_ray(), contextlib.suppress(ray.exceptions.ActorAlreadyExistsError):
            actor.remote(*arguments)

    def stop(self, worker: WorkerInfo, kill: bool) -> None:
        """See `Operator`."""
        known = self._known.get(worker.key)
        if known is None:
            return
        with _reaching_ray():
            if kill:
                ray.kill(known.handle, no_restart=True)
            elif not known.is_told:
                known.is_told = True
                known.handle.end.remote()

    def close(self) -> None:
        """See `Operator`."""

    def _seen(self, name: str) -> WorkerInfo | None:
        """None where the actor has just ended."""
        match = re.fullmatch(r"(.+)-(\d+)-(\d+)", name)
        if match is None:
            return None
        role: Any = match[1]
        info = WorkerInfo(role, int(match[2]), int(match[3]))
        if info.key not in self._known:
            try:
                handle = ray.get_actor(name, namespace=self._namespace)
            except ValueError:
                return None
            self._known[info.key] = _Known(handle, handle.where.remote())
        known = self._known[info.key]
        if known.place is None and ray.wait([known.where], timeout=0)[0]:
            try:
                known.place = ray.get(known.where)
            except ray.exceptions.RayError as error:  # its constructor raised, or it has died
                problem = f"{info.worker_id} ended: {str(error).strip().splitlines()[-1]}"
                return dataclasses.replace(info, health=WorkerHealth.DEAD, problem=problem)
        address, host, pid = known.place or (None, "", None)
        return dataclasses.replace(info, address=address, host=host, pid=pid)


class _WorkerActor:
    """The actor: a worker and the server of its calls."""

    def __init__(self, make_worker: bytes, worker_id: str, index: int, incarnation: int, silence: float) -> None:
        self._worker = cloudpickle.loads(make_worker)(worker_id, index, incarnation)
        self._end = WorkerEnd(Life(silence=silence))
        self._host = ray.util.get_node_ip_address()
        self._end.server = self._server = WorkerServer(self._worker, RayOperator.transport, f"{self._host}:0")
        threading.Thread(target=self._live, name="rlframe worker", daemon=True).start()

    def where(self) -> tuple[str, str, int]:
        """(address, host, pid) of the worker, which serves."""
        return self._server.address, self._host, os.getpid()

    def end(self) -> None:
        """Close the worker, and end this process."""
        self._end.come("it was released")

    def _live(self) -> None:
        self._end.has_come(None)
        self._server.stop()
        with contextlib.suppress(Exception):
            if hasattr(self._worker, "close"):
                self._worker.close()
        os._exit(0)


@dataclasses.dataclass
class _Known:
    """An actor of the run, and the answer to where it is."""

    handle: Any
    where: Any  # an object reference, until it is there
    place: tuple[str, str, int] | None = None
    is_told: bool = False


@contextlib.contextmanager
def _reaching_ray() -> Any:
    try:
        yield
    except (ray.exceptions.RaySystemError, ConnectionError, RuntimeError) as error:
        raise OperatorError(f"The Ray cluster does not answer: {error}") from error
