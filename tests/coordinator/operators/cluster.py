"""A Kubernetes API server on loopback, as far as Pods go, and what happens to them behind it.

It keeps to the documented behaviour that the operator depends on: names are unique until an object is gone, a deletion
with grace only marks a Pod that runs, `Status` objects explain refusals, what is not allowed is forbidden, and the
dependents of an owner that is deleted are collected.
"""

from __future__ import annotations

import http.server
import itertools
import json
import re
import threading
import urllib.parse
from collections.abc import Collection
from typing import Any

_PATH = re.compile(r"/api/v1/namespaces/(?P<namespace>[^/]+)/pods(?:/(?P<name>[^/]+))?$")
_REASONS = {400: "BadRequest", 403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 503: "ServiceUnavailable"}
_VERBS = {"POST": "create", "DELETE": "delete"}


class Cluster:
    """Pods, whoever asks for them, and a kubelet that runs each at once unless told otherwise.

    Args:
        verbs: what the caller may do with Pods.
    """

    def __init__(self, verbs: Collection[str] = ("create", "delete", "get", "list")) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.created: list[str] = []
        self.used: list[str] = []  # verbs
        self.deletions: list[tuple[str, int | None]] = []  # name, grace
        self.is_down = False
        self.loses_answers = False  # does what it is told, and then does not say so
        self.runs_pods = True
        self._verbs = set(verbs)
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        cluster = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with cluster._lock:
                    code, answer = cluster._answer(self.command, self.path, json.loads(body) if body else None)
                    lost = cluster.loses_answers and self.command != "GET"
                if lost:
                    self.close_connection = True
                    return
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = _serve

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    # --- what happens to Pods

    def add(self, pod: dict[str, Any]) -> dict[str, Any]:
        """Stores a Pod, as if somebody had created it."""
        with self._lock:
            number = next(self._numbers)
            pod["metadata"] |= {
                "namespace": "rl",
                "uid": f"uid-{number}",
                "resourceVersion": str(number),
                "creationTimestamp": "2026-01-01T00:00:00Z",
            }
            pod["status"] = {"phase": "Pending", "conditions": []}
            self.pods[pod["metadata"]["name"]] = pod
            if self.runs_pods:
                self.run(pod["metadata"]["name"])
            return pod

    def run(self, name: str) -> None:
        """The Pod is scheduled, its worker serves."""
        state = {"running": {"startedAt": "2026-01-01T00:00:01Z"}}
        with self._lock:
            pod = self._changed(name)
            pod["spec"]["nodeName"] = "node-1"
            pod["status"] = {
                "phase": "Running",
                "podIP": f"10.0.0.{pod['metadata']['resourceVersion']}",
                "containerStatuses": [_container(state, started=True)],
            }

    def is_unschedulable(self, name: str, why: str) -> None:
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
        with self._lock:
            self._changed(name)["status"] = {"phase": "Pending", "conditions": [condition]}

    def finish(self, name: str, exit_code: int, reason: str) -> None:
        """The Pod's container has ended."""
        state = {"terminated": {"exitCode": exit_code, "reason": reason}}
        with self._lock:
            phase = "Failed" if exit_code else "Succeeded"
            self._changed(name)["status"] |= {"phase": phase, "containerStatuses": [_container(state)]}

    def evict(self, name: str) -> None:
        """Somebody else deletes the Pod, which has not ended yet."""
        with self._lock:
            self._changed(name)["metadata"] |= {"deletionTimestamp": "2026-01-01T00:01:00Z"}

    def gone(self, name: str) -> None:
        """The kubelet has ended a Pod that was to be deleted."""
        with self._lock:
            assert "deletionTimestamp" in self.pods[name]["metadata"]
            del self.pods[name]

    def delete_owner(self, uid: str) -> None:
        """Collects the dependents of an object that was deleted."""
        with self._lock:
            for name, pod in list(self.pods.items()):
                if any(owner["uid"] == uid for owner in pod["metadata"].get("ownerReferences", [])):
                    del self.pods[name]

    def _changed(self, name: str) -> dict[str, Any]:
        self.pods[name]["metadata"]["resourceVersion"] = str(next(self._numbers))
        return self.pods[name]

    # --- the REST paths

    def _answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        if self.is_down:
            return _status(503, "the server is currently unable to handle the request")
        url = urllib.parse.urlsplit(path)
        query = {key: values[0] for key, values in urllib.parse.parse_qs(url.query).items()}
        match = _PATH.match(url.path)
        if match is None or match["namespace"] != "rl":
            return _status(404, f"the server could not find the requested resource {url.path}")
        name = match["name"]
        verb = _VERBS.get(method) or ("get" if name else "list")
        self.used.append(verb)
        if verb not in self._verbs:
            return _status(403, f'pods is forbidden: User "rlframe" cannot {verb} resource "pods"')
        if verb == "create":
            return self._create(body)
        if verb == "list":
            selector = dict(part.split("=") for part in query.get("labelSelector", "").split(",") if part)
            items = [pod for pod in self.pods.values() if selector.items() <= pod["metadata"].get("labels", {}).items()]
            version = {"resourceVersion": str(next(self._numbers))}
            return 200, {"apiVersion": "v1", "kind": "PodList", "metadata": version, "items": items}
        if name not in self.pods:
            return _status(404, f'pods "{name}" not found')
        if verb == "delete":
            grace = (body or {}).get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
            return self._delete(name, None if grace is None else int(grace))
        return 200, self.pods[name]

    def _create(self, pod: Any) -> tuple[int, Any]:
        name = pod["metadata"]["name"]
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
            return _status(400, f"invalid name {name!r}")
        for key, value in pod["metadata"].get("labels", {}).items():
            assert re.fullmatch(r"([a-z0-9.-]+/)?[A-Za-z0-9._-]{1,63}", key) and re.fullmatch(r"[A-Za-z0-9._-]+", value)
        if name in self.pods:
            return _status(409, f'pods "{name}" already exists')
        self.created.append(name)
        return 201, self.add(pod)

    def _delete(self, name: str, grace: int | None) -> tuple[int, Any]:
        self.deletions.append((name, grace))
        pod = self._changed(name)
        is_on_a_node = "nodeName" in pod["spec"] and pod["status"]["phase"] == "Running"
        if grace == 0 or not is_on_a_node:
            return 200, self.pods.pop(name)
        pod["metadata"] |= {"deletionTimestamp": "2026-01-01T00:01:00Z", "deletionGracePeriodSeconds": grace or 30}
        return 200, pod


def _container(state: dict[str, Any], started: bool = False) -> dict[str, Any]:
    names = {"name": "worker", "image": "rlframe:latest", "imageID": "sha256:0"}
    return {**names, "ready": started, "started": started, "restartCount": 0, "state": state}


def _status(code: int, message: str) -> tuple[int, Any]:
    status = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "code": code}
    return code, {**status, "reason": _REASONS[code], "message": message, "metadata": {}}
