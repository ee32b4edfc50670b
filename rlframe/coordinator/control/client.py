"""The control API's client, for the commands and for programs."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import httpx

from rlframe.coordinator.control.address import read_control
from rlframe.errors import ConflictError, FieldError, PeerError, RemoteError, UnavailableError, UsageError
from rlframe.http.config import read_token
from rlframe.shutdown import Closeable

_TIMEOUT = 15.0  # seconds for an answer: more than the service takes at most
_SILENCE = 15.0  # seconds in which a stream of events shows that it is there, three times over


class ControlClient(Closeable):
    """Calls a coordinator by its control API, with the coordinator's own methods. A context manager.

    Args:
        url: of the service, as `http://127.0.0.1:8765`.
        token: that it wants; None: none.

    Raises (every method):
        PeerError: nobody answers there, or not in time.
        UnavailableError: the service answers, and the coordinator does not: it may be restarting.
        UsageError: the token is wrong; what was asked for cannot be (`ConflictError`: in the state that the job is in).
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self.url = url.rstrip("/")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        try:
            # No proxy of the environment's: it would be handed the token.
            self._http = httpx.Client(base_url=self.url, headers=headers, timeout=_TIMEOUT, trust_env=False)
            if self._http.base_url.scheme not in ("http", "https") or not self._http.base_url.host:
                raise httpx.InvalidURL("no http://HOST:PORT")
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise UsageError(
                f"{url!r} is no URL of a coordinator's control, as http://127.0.0.1:8765 is: {error}."
            ) from error

    @classmethod
    def of_run(cls, run_dir: str | pathlib.Path) -> ControlClient:
        """Return a client of the run in a directory. Raise `UsageError` if it has no control."""
        known = read_control(run_dir)
        return cls(known.url, read_token(known.token_file))

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def status(self) -> dict[str, Any]:
        """Return the status, as `Coordinator.status`."""
        return self._get("/status")

    def events(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the first thousand events after the number `since`, without waiting for one."""
        return self._get("/events", since=since)["events"]

    def follow(self, since: int | None = None) -> Iterator[dict[str, Any]]:
        """Events as they happen, from after the number `since` on (None: from the last few), until the service ends."""
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
        """End the job, in good order."""
        return self._post("/stop", {"reason": reason})

    def pause(self) -> Any:
        """Pause the job."""
        return self._post("/pause")

    def unpause(self) -> Any:
        """End a pause."""
        return self._post("/resume")

    def scale(self, role: str, n: int) -> Any:
        """Set the number of workers of this role."""
        return self._post("/scale", {"role": role, "n": n})

    def evaluate_now(self) -> Any:
        """Evaluate the newest version."""
        return self._post("/evaluate")

    def checkpoint(self) -> Any:
        """Save the learner."""
        return self._post("/checkpoint")

    def restore(self) -> Any:
        """Send the learner back to its latest checkpoint."""
        return self._post("/restore")

    def _get(self, path: str, **query: Any) -> Any:
        return self._request("GET", path, params=query)

    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the `result` of the answer."""
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
                f"Nobody listens at {self.url}: has the run ended, or is its control elsewhere? (RUN_DIR, --url)"
            )
        if isinstance(error, httpx.TimeoutException):
            return PeerError(f"{self.url} did not answer within {_TIMEOUT:g} s. Ask again.")
        return PeerError(f"The connection to {self.url} broke off: {error}. Ask again.")

    def _check(self, response: httpx.Response) -> Any:
        """Return the answer. Raise the error of a refusal."""
        try:
            read = response.json()
            refused = read["error"] if response.status_code >= 400 else None
            message = "" if refused is None else str(refused["message"])
        except (ValueError, KeyError, TypeError):
            said = response.text[:100].replace("\n", " ")
            raise RemoteError(
                f"{self.url} answered {response.status_code} and nothing that a coordinator's control says: {said!r}."
            ) from None
        if refused is None:
            return read
        if response.status_code == 401:
            raise UsageError(
                f"{self.url} wants a token, and this is not it: name its file by --token-file, "
                "or the run by RUN_DIR, which knows it."
            )
        if response.status_code == 422:
            raise FieldError(refused.get("field"), message)
        kinds = {409: ConflictError, 503: UnavailableError}
        raise kinds.get(response.status_code, RemoteError)(message)
