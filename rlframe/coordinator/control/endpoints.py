"""The endpoints of the control API: each is one call of the coordinator; and its status for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query
from prometheus_client.core import GaugeMetricFamily, Metric
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response, StreamingResponse

from rlframe.coordinator.control.calls import CoordinatorCalls, EventLog
from rlframe.coordinator.messages import ROLES, Role
from rlframe.coordinator.states import JobState, WorkerState
from rlframe.errors import FieldError, RlframeError
from rlframe.http.app import metric_families
from rlframe.http.bodies import answer

MAX_EVENTS = 1000  # in one answer
Number = Annotated[int, Field(ge=0, le=2**53)]  # what a browser can count to
Text = Annotated[str, Field(max_length=1000)]


class ControlProblem(BaseModel):
    type: str
    message: str = Field(description="What is wrong, and what to do.")
    field: str | None = Field(description="Of the request.")


class ControlRefusal(BaseModel):
    error: ControlProblem


class Done(BaseModel):
    """The request is done, or under way: /status shows it."""

    status: Literal["ok"]
    result: Any = Field(None, description="What the coordinator returned.")


class Events(BaseModel):
    events: list[dict[str, Any]]


class Health(BaseModel):
    status: Literal["ok"]


class Scale(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: Role
    n: int = Field(ge=0, le=100_000, description="Live workers of this role that are wanted.")


class Stop(BaseModel):
    model_config = ConfigDict(extra="forbid")
    reason: Text = Field("", description="What the job's state says from then on.")


def _described(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: {"model": ControlRefusal, "description": _DESCRIPTIONS[status]} for status in statuses}


_DESCRIPTIONS = {
    400: "The body cannot be read, or not be decompressed.",
    401: "The service has a token, and this is not it.",
    403: "Asked by a page that is not this service's own, or under another name than its own.",
    408: "The body did not arrive in time.",
    409: "The state that the job is in does not allow it.",
    413: "The body is too large.",
    415: "The body's encoding is not known.",
    422: "A field is wrong; `error.field` names it.",
    503: "The coordinator does not answer now: again after Retry-After seconds.",
}
REFUSED = _described(400, 401, 403, 408, 413, 415)  # before an endpoint sees the request
READS = _described(503)
WRITES = _described(409, 422, 503)


def reading_router(calls: CoordinatorCalls, log: EventLog) -> APIRouter:
    """Make the endpoints that only read."""
    router = APIRouter()
    stream = {"content": {"text/event-stream": {"schema": {"type": "string"}}}, "description": "As they happen."}

    @router.get("/healthz", response_model=Health, tags=["service"])
    async def healthz() -> Response:
        """Whether this service runs, even if the coordinator does not answer. Needs no token."""
        return answer({"status": "ok"})

    @router.get("/status", response_model=dict[str, Any], responses=READS, tags=["job"])
    async def status() -> Response:
        """The job, its workers and tasks, the replay buffer, and the learning curve, as of now."""
        return answer(await calls.status())

    @router.get("/events", response_model=Events, responses=READS | _described(422), tags=["job"])
    async def events(since: Annotated[Number, Query(description="Those after this number.")] = 0) -> Response:
        """Events, oldest first, at most 1,000: the next request begins at the number of the last one."""
        return answer({"events": (await calls("events", since, 0.0))[:MAX_EVENTS]})

    @router.get(
        "/events/stream",
        response_class=StreamingResponse,
        responses={200: stream, **READS, **_described(422)},
        tags=["job"],
    )
    async def event_stream(
        since: Annotated[Number | None, Query(description="Those after this number; else the last 300.")] = None,
        last_event_id: Annotated[Number | None, Header(description="As `since`, of a client that comes back.")] = None,
    ) -> Response:
        """Server-sent events as they happen, whose ids are the numbers of the events. A comment comes every 5 s."""
        known = last_event_id if last_event_id is not None else since
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(await log.stream(known), headers=headers, media_type="text/event-stream")

    return router


# Path -> method of the coordinator, without arguments, and its description.
_PLAIN_COMMANDS = {
    "/pause": ("pause", "Pause the learner and the collectors."),
    "/resume": ("unpause", "End a pause."),
    "/evaluate": ("evaluate_now", "Evaluate the newest version, beside the training."),
    "/checkpoint": ("checkpoint", "Save the learner."),
    "/restore": ("restore", "Send the learner back to its latest checkpoint; versions keep rising."),
}


def command_router(calls: CoordinatorCalls, commands: Collection[str]) -> APIRouter:
    """Make the endpoints that change the job: `commands`, of the methods of its target."""
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
        _check_limits(await calls.status(), body)
        return await call("scale", body.role, body.n)

    async def stop(body: Stop) -> Response:
        return await call("cancel", body.reason)

    offer("/scale", "scale", scale, "Set the number of workers of this role, within the limits of the job.")
    offer("/stop", "cancel", stop, "End the job: it saves and ends its workers; nothing is evaluated any more.")
    return router


def _check_limits(status: dict[str, Any], body: Scale) -> None:
    limits = (status.get("limits") or {}).get(body.role)
    if limits is not None and not limits[0] <= body.n <= limits[1]:
        raise FieldError(
            "n", f"This job has between {limits[0]} and {limits[1]} of the role {body.role}, not {body.n}."
        )


# --- for Prometheus

# Name, help and the key in `status["job"]`.
_COUNTERS = (
    ("env_steps", "Environment steps of the job.", "env_steps"),
    ("learner_steps", "Updates of the learner.", "learner_steps"),
    ("task_retries", "Attempts at tasks beyond the first.", "retries"),
    ("worker_restarts", "Workers that were replaced.", "restarts"),
    ("coordinator_restarts", "How often the coordinator was started again.", "coordinator_restarts"),
)
_GAUGES = (
    ("env_steps_until", "Environment steps at which the job ends.", "until"),
    ("env_steps_per_second", "Of all collectors, lately.", "env_steps_per_second"),
    ("updates_per_second", "Of the learner, lately.", "updates_per_second"),
    ("params_version", "Version that the learner published last.", "params_version"),
    ("staleness_versions", "Mean age in versions of the data that is learned from.", "staleness"),
    ("return_mean", "Newest mean return in training.", "return_mean"),
    ("eval_return", "Newest evaluation.", "eval_return"),
    ("evaluated_version", "Version of the newest evaluation.", "evaluated_version"),
)


async def read_families(calls: CoordinatorCalls, prefix: str) -> Iterator[Metric]:
    """Return the coordinator's status as metrics."""
    try:
        status: dict[str, Any] | None = await calls.status()
    except RlframeError:
        status = None
    return families(prefix, status)


def families(prefix: str, status: dict[str, Any] | None) -> Iterator[Metric]:
    """Yield the metrics of a status; None: the coordinator does not answer."""
    yield GaugeMetricFamily(prefix + "up", "1 where the coordinator answers.", status is not None)
    if status is None:
        return
    job = status["job"]
    yield from metric_families(prefix, _COUNTERS, _GAUGES, job.get)
    state = GaugeMetricFamily(prefix + "job_state", "1 for the state that the job is in.", labels=["state"])
    for one in JobState:
        state.add_metric([one.name], job["state"] == one.name)
    yield state
    yield _workers(prefix, status)
    for name, help_text, key in (
        ("replay", "Counts of the replay buffer.", "replay"),
        ("batches", "Batches by what became of them.", "accounts"),
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
