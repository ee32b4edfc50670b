"""The endpoints of a queue of jobs."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel
from starlette.responses import Response

from rlframe.coordinator.control.endpoints import BY_ID, Done, Stop
from rlframe.coordinator.control.jobs import JobQueue
from rlframe.http.middleware import answer

JobId = Annotated[str, Path(max_length=50, description="As /submit answered it: job-0001.")]


class Jobs(BaseModel):
    jobs: list[dict[str, Any]]


def jobs_router(queue: JobQueue) -> APIRouter:
    """The jobs of a queue. No coroutines: they write to the disk, so each has a thread."""
    router = APIRouter(tags=["jobs"])

    @router.get("/jobs", response_model=Jobs)
    def jobs() -> Response:
        """All of them, in the order in which they were submitted."""
        return answer({"jobs": queue.jobs()})

    @router.get("/jobs/{job_id}", response_model=dict[str, Any], responses=BY_ID)
    def job(job_id: JobId) -> Response:
        """One of them."""
        return answer(queue.job(job_id))

    @router.post("/jobs/{job_id}/cancel", response_model=Done, responses=BY_ID)
    def cancel(job_id: JobId, body: Stop | None = None) -> Response:
        """Takes it out of the queue; ends it in good order where it runs."""
        return answer({"status": "ok", "result": queue.cancel(job_id, body.reason if body else "")})

    return router
