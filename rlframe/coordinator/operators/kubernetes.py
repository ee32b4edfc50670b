"""Workers as Pods: one for each incarnation, made from a template of its role.

The API server is asked for all Pods of the run in every round, so that nothing depends on having heard of a change.
A Pod's name holds its incarnation: what was created by a call that was not answered is found to be there.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from rlframe import extras
from rlframe.coordinator.operators.base import OperatorError, WorkerInfo, worker_id_of
from rlframe.coordinator.operators.reconcile import Backoff, End, Health, Seen, Start
from rlframe.coordinator.operators.reconciling import ReconcilingOperator
from rlframe.errors import UsageError

with extras.needed("KubernetesOperator", "kubernetes"):
    import kubernetes
    import urllib3
    import yaml

MANAGED_BY = "rlframe-coordinator"
PORT = 7400  # of every worker, in a Pod of its own

_EVERY = 1.0  # seconds between two lists of the Pods
_TIMEOUT = (1.0, 3.0)  # seconds to connect, and between two parts of an answer
_GRACE = 10  # seconds between SIGTERM and SIGKILL: a worker needs up to 6 to close
_STARTING = 600  # seconds that a worker may take to serve: it may have to wait for an accelerator's driver, or compile


@dataclasses.dataclass(frozen=True)
class KubernetesConfig:
    """Which Pods, and where.

    Attributes:
        run: the name of the run: the Pods are called RUN-ROLE-INDEX-INCARNATION, and labelled with it.
        namespace: theirs.
        state_dir: the directory with `workers.pkl`, as the workers' Pods mount it.
        templates: by role, a Pod's manifest (a mapping, as from YAML), whose first container is the worker's; its
            name, its owner, `command` and `args` are filled in, and what is added to labels and the environment.
        owner_pod: the name of the coordinator's own Pod (by the downward API). What controls that one, a StatefulSet,
            owns the workers: when it is deleted they are, and not when the Pod is replaced. Empty: nobody owns them.
        silence: seconds without a call after which a worker ends by itself: longer than the coordinator's Pod takes to
            move to another node, so that its successor finds them at work.
    """

    run: str
    namespace: str
    state_dir: str
    templates: Mapping[str, Mapping[str, Any]]
    owner_pod: str = ""
    silence: float = 600.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", self.run):
            raise UsageError(
                f"The run's name {self.run!r} cannot be part of a Pod's: up to 40 of a-z, 0-9 and '-', the first one "
                "a letter, the last one no '-'."
            )
        if not self.silence > 0:
            raise UsageError(f"KubernetesConfig.silence must be more than 0 seconds, got {self.silence}.")
        for role, template in self.templates.items():
            if not template.get("spec", {}).get("containers"):
                raise UsageError(
                    f"The template of the role {role!r} has no spec.containers: it must be a Pod's manifest."
                )


class KubernetesOperator(ReconcilingOperator):
    """Creates, lists and deletes Pods. Needs the verbs that `deploy/kubernetes/coordinator.yaml` allows.

    Args:
        state_dir: a directory that outlives the coordinator's Pod, for the incarnations.
        config: which Pods.
        api: a `kubernetes.client.ApiClient`; None: as in the Pod that this runs in, or as `kubectl` is set up.
        backoff: between the deaths of a worker that does not stay up.
        every: seconds between two lists of the Pods.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str],
        config: KubernetesConfig,
        *,
        api: Any = None,
        backoff: Backoff | None = None,
        every: float = _EVERY,
    ) -> None:
        super().__init__(
            lambda: _Pods(config, api or _api_client()),
            state_dir,
            roles=tuple(config.templates),
            every=every,
            backoff=backoff,
            grace=_GRACE,
        )


def load_templates(directory: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The templates in ROLE.yaml of a directory, as `deploy/kubernetes/workers.yaml` has them mounted."""
    paths = sorted(pathlib.Path(directory).glob("*.yaml"))
    if not paths:
        raise UsageError(f"{directory} has no ROLE.yaml: it must hold a Pod's manifest for each role.")
    return {path.stem: yaml.safe_load(path.read_text()) for path in paths}


def labels_of(run: str) -> dict[str, str]:
    """The labels by which the Pods of a run's workers are found."""
    return {"app.kubernetes.io/managed-by": MANAGED_BY, "rlframe/run": run}


def manifest(config: KubernetesConfig, start: Start, owner: Mapping[str, Any] | None) -> dict[str, Any]:
    """The Pod of this worker."""
    pod = copy.deepcopy(dict(config.templates[start.role]))
    pod |= {"apiVersion": "v1", "kind": "Pod"}
    metadata, spec = pod.setdefault("metadata", {}), pod["spec"]
    metadata["name"] = f"{config.run}-{start.role}-{start.index}-{start.incarnation}"
    metadata["labels"] = {
        **(metadata.get("labels") or {}),
        "app.kubernetes.io/name": "rlframe",
        **labels_of(config.run),
        "rlframe/role": start.role,
        "rlframe/index": str(start.index),
        "rlframe/incarnation": str(start.incarnation),
    }
    if owner is not None:
        metadata["ownerReferences"] = [dict(owner)]
    spec["restartPolicy"] = "Never"  # a container that came back would be an incarnation that nobody counted
    spec.setdefault("terminationGracePeriodSeconds", _GRACE)
    container = spec["containers"][0]
    container["command"] = ["python", "-m", "rlframe.coordinator.workers.process"]
    worker = [config.state_dir, start.role, str(start.index), str(start.incarnation)]
    options = ["--address", f"$(POD_IP):{PORT}", "--silence", f"{config.silence:g}"]
    container["args"] = [*worker, *options]
    container["env"] = [
        *(container.get("env") or []),
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]
    # Its success makes `started` true, for good: until then the worker has no address.
    probe = {"tcpSocket": {"port": PORT}, "periodSeconds": 1, "failureThreshold": _STARTING}
    container.setdefault("startupProbe", probe)
    return pod


class _Pods:
    """The backend: the Pods of one run."""

    def __init__(self, config: KubernetesConfig, api: Any) -> None:
        self._config = config
        self._core = kubernetes.client.CoreV1Api(api)
        self._owner: dict[str, Any] | None = None
        self._selector = ",".join(f"{name}={value}" for name, value in labels_of(config.run).items())

    def observe(self) -> list[Seen]:
        """See `Backend.observe`."""
        pods = self._call(self._core.list_namespaced_pod, label_selector=self._selector).items
        seen = (_seen(pod) for pod in pods)
        return [one for one in seen if one is not None]

    def start(self, start: Start) -> None:
        """See `Backend.start`."""
        if self._owner is None and self._config.owner_pod:
            self._owner = self._find_owner()
        body = manifest(self._config, start, self._owner)
        try:
            self._call(self._core.create_namespaced_pod, body=body)
        except _ApiError as error:
            if error.status != 409:  # else it is there: an earlier call had been heard
                raise

    def end(self, end: End) -> None:
        """See `Backend.end`."""
        if end.seen.health is Health.LEAVING and not end.kill:
            return
        info = end.seen.info
        name = f"{self._config.run}-{info.role}-{info.index}-{info.incarnation}"
        try:
            self._call(self._core.delete_namespaced_pod, name=name, grace_period_seconds=0 if end.kill else _GRACE)
        except _ApiError as error:
            if error.status != 404:  # else it is gone
                raise

    def close(self) -> None:
        """See `Backend.close`."""

    def _find_owner(self) -> dict[str, Any]:
        pod = self._call(self._core.read_namespaced_pod, name=self._config.owner_pod)
        controllers = [owner for owner in pod.metadata.owner_references or [] if owner.controller]
        if not controllers:  # a bare Pod is not started again: neither are its workers
            own = pod.metadata
            return {"apiVersion": "v1", "kind": "Pod", "name": own.name, "uid": own.uid}
        (owner,) = controllers
        return {"apiVersion": owner.api_version, "kind": owner.kind, "name": owner.name, "uid": owner.uid}

    def _call(self, method: Any, **arguments: Any) -> Any:
        try:
            return method(namespace=self._config.namespace, _request_timeout=_TIMEOUT, **arguments)
        except kubernetes.client.ApiException as error:
            raise _ApiError(method.__name__, error) from error
        except urllib3.exceptions.HTTPError as error:
            raise OperatorError(f"The Kubernetes API server does not answer: {error}.") from error


class _ApiError(OperatorError):
    """The API server said no."""

    def __init__(self, what: str, error: Any) -> None:
        self.status = error.status
        try:
            reason = json.loads(error.body)["message"]
        except (TypeError, ValueError, KeyError):
            reason = error.reason
        advice = {
            401: " Are the credentials those of the cluster?",
            403: " deploy/kubernetes/coordinator.yaml has the Role that the coordinator needs.",
        }.get(error.status, "")
        super().__init__(f"The Kubernetes API server answered {error.status} to {what}: {reason}.{advice}")


def _seen(pod: Any) -> Seen | None:
    """What a Pod says of its worker; None where it is none's."""
    labels, status = pod.metadata.labels or {}, pod.status
    try:
        role = labels["rlframe/role"]
        index, incarnation = int(labels["rlframe/index"]), int(labels["rlframe/incarnation"])
    except (KeyError, ValueError):
        return None
    containers = status.container_statuses or []
    serves = status.phase == "Running" and status.pod_ip and containers and containers[0].started
    address = f"{_bracketed(status.pod_ip)}:{PORT}" if serves else None
    host = pod.spec.node_name or ""
    info = WorkerInfo(worker_id_of(role, index), role, index, incarnation, address, host, None)
    if pod.metadata.deletion_timestamp is not None:
        return Seen(info, Health.LEAVING, f"{info.worker_id} is being deleted.")
    if status.phase in ("Failed", "Succeeded"):
        return Seen(info, Health.DEAD, f"{info.worker_id} ended: {_how_it_ended(status)}.")
    waits = _why_it_waits(status) if status.phase == "Pending" else ""
    return Seen(info, problem=f"{info.worker_id} does not start: {waits.rstrip('.')}." if waits else "")


def _bracketed(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _how_it_ended(status: Any) -> str:
    for container in status.container_statuses or []:
        ended = container.state.terminated if container.state else None
        if ended is not None:
            reason = f" ({ended.reason})" if ended.reason else ""
            return f"exit code {ended.exit_code}{reason}"
    return status.message or status.reason or status.phase


def _why_it_waits(status: Any) -> str:
    for condition in status.conditions or []:
        if condition.type == "PodScheduled" and condition.status == "False":
            return f"{condition.reason}: {condition.message}"
    for container in status.container_statuses or []:
        waiting = container.state.waiting if container.state else None
        if waiting is not None and waiting.reason not in (None, "ContainerCreating", "PodInitializing"):
            return f"{waiting.reason}: {waiting.message}" if waiting.message else waiting.reason
    return ""


def _api_client() -> Any:
    configuration = kubernetes.client.Configuration()
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST"):
            kubernetes.config.load_incluster_config(client_configuration=configuration)
        else:
            kubernetes.config.load_kube_config(client_configuration=configuration)
    except kubernetes.config.ConfigException as error:
        raise OperatorError(f"It is not known where the Kubernetes API server is: {error}") from error
    configuration.retries = False  # the operator's rounds are the repetition
    return kubernetes.client.ApiClient(configuration)
