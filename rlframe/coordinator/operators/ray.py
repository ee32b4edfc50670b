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
from rlframe.coordinator.operators.base import OperatorError, WorkerInfo, WorkerKey, worker_id_of
from rlframe.coordinator.operators.reconcile import Backoff, End, Health, Seen, Start
from rlframe.coordinator.operators.reconciling import ReconcilingOperator
from rlframe.coordinator.workers.process import SILENCE, Ending, Life, Server
from rlframe.coordinator.workers.records import MakeWorker
from rlframe.errors import UsageError

with extras.needed("RayOperator", "ray"):
    import ray

_EVERY = 0.5  # seconds between two lists of the actors
_GRACE = 8.0  # seconds between being told to end and being killed

Options = Mapping[str, Any]  # of an actor: num_cpus, num_gpus, resources, runtime_env, ...


class RayOperator(ReconcilingOperator):
    """Creates, finds and kills actors. `ray.init` is the caller's: it says which cluster.

    Args:
        state_dir: a directory that outlives the coordinator, for the incarnations.
        run: the name of the run, by which its actors are told from others.
        workers: by role, what makes a worker.
        options: by role, the actors' options; a role that is missing has one CPU, the learner all that Ray gives it.
        silence: seconds without a call after which a worker ends.
        backoff: between the deaths of a worker that does not stay up.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        run: str,
        workers: Mapping[str, MakeWorker],
        options: Mapping[str, Options] | None = None,
        *,
        silence: float = SILENCE,
        backoff: Backoff | None = None,
    ) -> None:
        if not run:
            raise UsageError("The run needs a name, by which its actors are told from others.")
        super().__init__(
            lambda: _Actors(run, dict(workers), options or {}, silence),
            state_dir,
            roles=tuple(workers),
            every=_EVERY,
            backoff=backoff,
            grace=_GRACE,
        )


class _WorkerActor:
    """What runs in the actor's process."""

    def __init__(self, make_worker: bytes, worker_id: str, index: int, incarnation: int, silence: float) -> None:
        self._worker = cloudpickle.loads(make_worker)(worker_id, index, incarnation)
        self._end = Ending(Life(silence=silence))
        self._host = ray.util.get_node_ip_address()
        self._end.server = self._server = Server(self._worker, RayOperator.transport, f"{self._host}:0")
        threading.Thread(target=self._live, name="rlframe worker", daemon=True).start()

    def where(self) -> tuple[str, str, int]:
        """(address, host, pid) of the worker, which serves."""
        return self._server.address, self._host, os.getpid()

    def end(self) -> None:
        """Has the worker close, and this process end."""
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


class _Actors:
    """The backend: the named actors of one run."""

    def __init__(self, run: str, workers: Mapping[str, MakeWorker], options: Mapping[str, Options], silence: float):
        self._namespace = f"rlframe-{run}"
        self._makers = {role: cloudpickle.dumps(maker) for role, maker in workers.items()}
        self._options, self._silence = options, silence
        self._known: dict[WorkerKey, _Known] = {}

    def observe(self) -> list[Seen]:
        """See `Backend.observe`."""
        with _reaching_ray():
            names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if self._is_ours(actor)]
            seen = [one for one in map(self._seen, names) if one is not None]
        keys = {one.info.key for one in seen}
        self._known = {key: known for key, known in self._known.items() if key in keys}
        return seen

    def start(self, start: Start) -> None:
        """See `Backend.start`."""
        options = {"num_cpus": 1, **self._options.get(start.role, {})}
        actor = ray.remote(_WorkerActor).options(
            **options,
            name=f"{start.role}-{start.index}-{start.incarnation}",
            namespace=self._namespace,
            lifetime="detached",  # it outlives the coordinator
            max_restarts=0,  # that is the operator's, which counts incarnations
            max_concurrency=2,  # `end` while `where` waits
        )
        arguments = (self._makers[start.role], start.worker_id, start.index, start.incarnation, self._silence)
        # It is there: an earlier call had been heard.
        with _reaching_ray(), contextlib.suppress(ray.exceptions.ActorAlreadyExistsError):
            actor.remote(*arguments)

    def end(self, end: End) -> None:
        """See `Backend.end`."""
        known = self._known.get(end.seen.info.key)
        if known is None:
            return
        with _reaching_ray():
            if end.kill:
                ray.kill(known.handle, no_restart=True)
            elif not known.is_told:
                known.is_told = True
                known.handle.end.remote()

    def close(self) -> None:
        """See `Backend.close`."""

    def _is_ours(self, actor: Mapping[str, str]) -> bool:
        return actor["namespace"] == self._namespace

    def _seen(self, name: str) -> Seen | None:
        """None where the actor has just ended."""
        match = re.fullmatch(r"(.+)-(\d+)-(\d+)", name)
        if match is None:
            return None
        role, index, incarnation = match[1], int(match[2]), int(match[3])
        key = (worker_id_of(role, index), incarnation)
        if key not in self._known:
            try:
                handle = ray.get_actor(name, namespace=self._namespace)
            except ValueError:
                return None
            self._known[key] = _Known(handle, handle.where.remote())
        known = self._known[key]
        problem = ""
        if known.place is None and ray.wait([known.where], timeout=0)[0]:
            try:
                known.place = ray.get(known.where)
            except ray.exceptions.RayError as error:  # its constructor raised, or it has died
                problem = f"{key[0]} ended: {str(error).strip().splitlines()[-1]}"
        address, host, pid = known.place or (None, "", None)
        info = WorkerInfo(key[0], role, index, incarnation, address, host, pid)
        return Seen(info, Health.DEAD if problem else Health.LIVE, problem)


@contextlib.contextmanager
def _reaching_ray() -> Any:
    try:
        yield
    except (ray.exceptions.RaySystemError, ConnectionError, RuntimeError) as error:
        raise OperatorError(f"The Ray cluster does not answer: {error}") from error
