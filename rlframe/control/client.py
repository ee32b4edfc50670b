"""A client of the control API, for the command line and for programs."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import httpx

from rlframe.control.address import read_control
from rlframe.errors import ConflictError, FieldError, PeerError, RemoteError, UnavailableError, UsageError
from rlframe.http.config import read_token
from rlframe.shutdown import Closeable

_TIMEOUT = 15.0  # seconds to wait for a response; longer than all deadlines of the service
_SILENCE = 15.0  # seconds without data before an event stream fails: three heartbeats


class ControlClient(Closeable):
    """A client of the control API with the same methods as the coordinator. A context manager.

    Args:
        url: The service's URL, such as `http://127.0.0.1:8765`.
        token: The service's token; None if it requires no token.

    Raises (every method):
        PeerError: The service cannot be reached, or did not respond in time.
        UnavailableError: The service responds, but the coordinator does not: it may be restarting.
        UsageError: The token is wrong, or the request is invalid (`ConflictError`: invalid in the job's current state).
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            # Ignore proxies from the environment: a proxy would receive the token.
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT, trust_env=False)
            if self._http.base_url.scheme not in ("http", "https") or not self._http.base_url.host:
                raise httpx.InvalidURL("it is not of the form http://HOST:PORT")
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise UsageError(
                f"{url!r} is not the URL of a control API, such as http://127.0.0.1:8765: {error}."
            ) from error

    @classmethod
    def of_run(cls, run_dir: str | pathlib.Path) -> ControlClient:
        """Return a client of the run in a directory. Raise `UsageError` if the run has no control API."""
        known = read_control(run_dir)
        return cls(known.url, read_token(known.token_file))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def status(self) -> dict[str, Any]:
        """Return the status of the job. See `Coordinator.status`."""
        return self._get("/status")

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        """Return up to 1,000 events whose numbers are above `since`, oldest first. Do not wait for new events."""
        return self._get("/events", since=since)["events"]

    def follow(self, since: int | None = None) -> Iterator[dict[str, Any]]:
        """Yield events after event number `since`, until the service ends. None starts with the most recent events."""
        query = {} if since is None else {"since": since}
        timeout = httpx.Timeout(_TIMEOUT, read=_SILENCE)
        try:
            with self._http.stream("GET", "/events/stream", params=query, timeout=timeout) as response:
                if response.status_code != 200:
                    response.read()
                    self._check(response)
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        yield json.loads(line.removeprefix("data: "))
        except httpx.HTTPError as error:
            raise self._connection_error(error) from error

    def cancel(self, reason: str = "") -> Any:
        """End the job: save the learner, close all tasks, end the workers."""
        return self._post("/stop", {"reason": reason})

    def pause(self) -> Any:
        """Pause the job."""
        return self._post("/pause")

    def unpause(self) -> Any:
        """End a pause."""
        return self._post("/resume")

    def scale(self, role: str, n: int) -> Any:
        """Set the number of workers of a role."""
        return self._post("/scale", {"role": role, "n": n})

    def evaluate_now(self) -> Any:
        """Evaluate the newest version."""
        return self._post("/evaluate")

    def checkpoint(self) -> Any:
        """Save a checkpoint of the learner at its next update."""
        return self._post("/checkpoint")

    def restore(self) -> Any:
        """Restart the learner from its latest checkpoint."""
        return self._post("/restore")

    def _get(self, path: str, **query: Any) -> Any:
        return self._request("GET", path, params=query)

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the field `result` of the response."""
        return self._request("POST", path, **({} if body is None else {"json": body})).get("result")

    def _request(self, method: str, path: str, **arguments: Any) -> Any:
        try:
            response = self._http.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise self._connection_error(error) from error
        return self._check(response)

    def _connection_error(self, error: httpx.HTTPError) -> PeerError:
        if isinstance(error, httpx.ConnectError):
            return PeerError(
                f"Nothing listens at {self.url}. The run may have ended, or its control API may have another address. "
                "Check RUN_DIR or --url."
            )
        if isinstance(error, httpx.TimeoutException):
            return PeerError(f"{self.url} did not answer within {_TIMEOUT:g} s. Try again.")
        return PeerError(f"The connection to {self.url} broke: {error}. Try again.")

    def _check(self, response: httpx.Response) -> Any:
        """Return the response's JSON. Raise an exception for an error response."""
        try:
            read = response.json()
            refused = read["error"] if response.status_code >= 400 else None
            message = "" if refused is None else str(refused["message"])
        except (ValueError, KeyError, TypeError):
            said = response.text[:100].replace("\n", " ")
            raise RemoteError(
                f"{self.url} answered {response.status_code} with a body that is not from a control API: {said!r}. "
                "Check the URL."
            ) from None
        if refused is None:
            return read
        if response.status_code == 401:
            raise UsageError(
                f"{self.url} requires a token, and the given token is missing or wrong. Name its file by "
                "--token-file, or pass RUN_DIR, where the token is found automatically."
            )
        if response.status_code == 422:
            raise FieldError(message, refused.get("field"))
        kinds = {409: ConflictError, 503: UnavailableError}
        raise kinds.get(response.status_code, RemoteError)(message)
