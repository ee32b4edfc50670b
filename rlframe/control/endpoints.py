"""The endpoints of the control API and of the Prometheus metrics. Each endpoint calls the coordinator once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query
from prometheus_client.core import GaugeMetricFamily, Metric
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from rlframe.control.calls import CoordinatorCalls, EventLog
from rlframe.coordinator.messages import ROLES, Role
from rlframe.coordinator.states import JobState, WorkerState
from rlframe.errors import RlframeError
from rlframe.http.app import metric_families
from rlframe.http.bodies import answer

MAX_EVENTS = 1000  # maximum number of events in one response
Number = Annotated[int, Field(ge=0, le=2**53)]  # JavaScript numbers are exact up to 2**53
Text = Annotated[str, Field(max_length=1000)]


class ControlProblem(BaseModel):
    type: str
    message: str = Field(description="The problem, and how to fix it.")
    field: str | None = Field(description="The invalid field of the request, if any.")


class ControlRefusal(BaseModel):
    error: ControlProblem


class Done(BaseModel):
    """The coordinator accepted the request. /status shows its progress."""

    status: Literal["ok"]
    result: Any = Field(None, description="Return value of the coordinator's method.")


class Events(BaseModel):
    events: list[dict[str, Any]]


class Health(BaseModel):
    status: Literal["ok"]


class Scale(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: Role
    n: int = Field(ge=0, le=100_000, description="Requested number of live workers of this role.")


class Stop(BaseModel):
    model_config = ConfigDict(extra="forbid")
    reason: Text = Field("", description="Reason to stop. The job's status shows it.")


def _described(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ControlRefusal, "description": _DESCRIPTIONS[status]} for status in statuses}


_DESCRIPTIONS = {
    400: "The body cannot be read or decompressed.",
    401: "The token is missing or wrong.",
    403: "The request comes from a page of another origin, or its Host header does not name this service.",
    408: "The body did not arrive in time.",
    409: "The job's current state does not allow the request.",
    413: "The body is too large.",
    415: "The body's encoding is not supported.",
    422: "A field is invalid; `error.field` names it.",
    503: "The coordinator does not respond. Try again after Retry-After seconds.",
}
REFUSED = _described(400, 401, 403, 408, 413, 415)  # responses to requests that never reach an endpoint
READS = _described(503)
WRITES = _described(409, 422, 503)


def reading_router(calls: CoordinatorCalls, log: EventLog) -> APIRouter:
    """Return the endpoints that do not change the job."""
    router = APIRouter()
    stream = {
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
        "description": "A stream of server-sent events.",
    }

    @router.get("/healthz", response_model=Health, tags=["service"])
    async def healthz() -> Response:
        """Return 200 while this service runs, even if the coordinator does not respond. Requires no token."""
        return answer({"status": "ok"})

    @router.get("/status", response_model=dict[str, Any], responses=READS, tags=["job"])
    async def status() -> Response:
        """Return the current status of the job, its workers, its tasks, the replay buffer, and the learning curve."""
        return answer(await calls.status())

    @router.get("/events", response_model=Events, responses=READS | _described(422), tags=["job"])
    async def events(since: Annotated[Number, Query(description="Only events after this number.")] = 0) -> Response:
        """Return up to 1,000 events, oldest first. For the next page, set `since` to the last event's number."""
        return answer({"events": (await calls("events", since, 0.0))[:MAX_EVENTS]})

    @router.get(
        "/events/stream",
        response_class=StreamingResponse,
        responses={200: stream, **READS, **_described(422)},
        tags=["job"],
    )
    async def event_stream(
        since: Annotated[
            Number | None, Query(description="Only events after this number. The default is the last 300 events.")
        ] = None,
        last_event_id: Annotated[
            Number | None, Header(description="Same as `since`. Sent by browsers that reconnect.")
        ] = None,
    ) -> Response:
        """Stream server-sent events. Each id is an event's number. After 5 s without an event, send a comment."""
        known = last_event_id if last_event_id is not None else since
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(await log.stream(known), headers=headers, media_type="text/event-stream")

    return router


# Commands without arguments, as path -> (method of the coordinator, description).
_PLAIN_COMMANDS = {
    "/pause": ("pause", "Pause the learner and the collectors."),
    "/resume": ("unpause", "End a pause."),
    "/evaluate": ("evaluate_now", "Evaluate the newest version while training continues."),
    "/checkpoint": ("checkpoint", "Save a checkpoint of the learner."),
    "/restore": ("restore", "Restart the learner from its latest checkpoint. Version numbers keep rising."),
}


def command_router(calls: CoordinatorCalls, commands: Collection[str]) -> APIRouter:
    """Return the endpoints that change the job. `commands` lists the methods of the target that get an endpoint."""
    router = APIRouter(tags=["commands"])

    async def call(method: str, *args: Any) -> Response:
        try:
            result = await calls(method, *args)
        finally:
            calls.forget_status()
        return answer({"status": "ok", "result": result})

    def offer(path: str, method: str, endpoint: Callable[..., Any], doc: str) -> None:
        if method not in commands:
            return
        endpoint.__doc__ = doc
        router.add_api_route(
            path,
            endpoint,
            methods=["POST"],
            response_model=Done,
            responses=WRITES,
            name=path[1:],
            operation_id=method,
        )

    def plain(method: str) -> Callable[[], Any]:
        async def endpoint() -> Response:
            return await call(method)

        return endpoint

    for path, (method, doc) in _PLAIN_COMMANDS.items():
        offer(path, method, plain(method), doc)

    async def scale(body: Scale) -> Response:
        return await call("scale", body.role, body.n)

    async def stop(body: Stop) -> Response:
        return await call("cancel", body.reason)

    offer("/scale", "scale", scale, "Set the number of workers of a role, within the job's limits.")
    offer("/stop", "cancel", stop, "End the job: save the learner and end the workers, without a last evaluation.")
    return router


# --- metrics for Prometheus

# (name of the metric, its help text, its key in `status["job"]`)
_COUNTERS = (
    ("env_steps", "Environment steps of the job.", "env_steps"),
    ("learner_steps", "Updates of the learner.", "learner_steps"),
    ("task_retries", "Retries of tasks.", "retries"),
    ("worker_restarts", "Replaced workers.", "restarts"),
    ("coordinator_restarts", "Restarts of the coordinator.", "coordinator_restarts"),
)
_GAUGES = (
    ("env_steps_until", "Environment steps at which the job ends.", "until"),
    (
        "env_steps_per_second",
        "Environment steps per second of all collectors, over the last 5 s.",
        "env_steps_per_second",
    ),
    ("updates_per_second", "Updates per second of the learner, over the last 5 s.", "updates_per_second"),
    ("params_version", "Newest version that the learner has published.", "params_version"),
    ("staleness_versions", "Mean age, in versions, of the data in a batch.", "staleness"),
    ("return_mean", "Newest mean return in training.", "return_mean"),
    ("eval_return", "Mean return of the newest evaluation.", "eval_return"),
    ("evaluated_version", "Policy version that the newest evaluation used.", "evaluated_version"),
)


async def read_families(calls: CoordinatorCalls, prefix: str) -> Iterator[Metric]:
    """Return the coordinator's status as metrics."""
    try:
        status: dict[str, Any] | None = await calls.status()
    except RlframeError:
        status = None
    return families(prefix, status)


def families(prefix: str, status: dict[str, Any] | None) -> Iterator[Metric]:
    """Yield the metrics that a status contains. None means that the coordinator does not respond."""
    yield GaugeMetricFamily(prefix + "up", "1 if the coordinator responds.", status is not None)
    if status is None:
        return
    job = status["job"]
    yield from metric_families(prefix, _COUNTERS, _GAUGES, job.get)
    state = GaugeMetricFamily(prefix + "job_state", "1 for the job's current state, 0 for others.", labels=["state"])
    for one in JobState:
        state.add_metric([one.name], job["state"] == one.name)
    yield state
    yield _workers(prefix, status)
    for name, help_text, key in (
        ("replay", "Counts of the replay buffer.", "replay"),
        ("batches", "Batches by outcome.", "accounts"),
    ):
        metric = GaugeMetricFamily(prefix + name, help_text, labels=["count"])
        for count, value in (status.get(key) or {}).items():
            if isinstance(value, (int, float)):
                metric.add_metric([str(count)], value)
        yield metric


def _workers(prefix: str, status: dict[str, Any]) -> Metric:
    counts = Counter((one["role"], one["state"]) for one in status.get("workers") or ())
    workers = GaugeMetricFamily(prefix + "workers", "Workers by role and state.", labels=["role", "state"])
    for role in ROLES if "wanted" in status else sorted({role for role, _ in counts}):
        for state in WorkerState:
            workers.add_metric([role, state.name], counts[role, state.name])
    return workers
