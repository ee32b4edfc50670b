"""Workers as Pods: one for each incarnation, made from a template of its role.

The API server is asked for all Pods of the run in every round, so that nothing depends on having heard of a change.
A Pod's name holds its incarnation: what was created by a call that was not answered is found to be there.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from rlframe import extras
from rlframe.coordinator.messages import WorkerHealth, WorkerInfo, worker_id_of
from rlframe.coordinator.operators.base import OperatorError
from rlframe.errors import UsageError
from rlframe.transport import DEFAULT, Transport

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


class KubernetesOperator:
    """Creates, lists and deletes Pods, by the verbs that `deploy/kubernetes/coordinator.yaml` allows. See `Operator`.

    Args:
        config: which Pods.
        api: a `kubernetes.client.ApiClient`; None: as in the Pod that this runs in, or as `kubectl` is set up.
        every: seconds between two lists of the Pods.
    """

    transport: Transport = DEFAULT
    grace: float = _GRACE
    starts = True

    def __init__(self, config: KubernetesConfig, *, api: Any = None, every: float = _EVERY) -> None:
        self.every = every
        self._config, self._api = config, api
        self._owner: dict[str, Any] | None = None
        self._selector = ",".join(f"{name}={value}" for name, value in labels_of(config.run).items())

    @functools.cached_property
    def _core(self) -> Any:
        return kubernetes.client.CoreV1Api(self._api or _api_client())

    def list(self) -> list[WorkerInfo]:
        """See `Operator`."""
        pods = self._call(self._core.list_namespaced_pod, label_selector=self._selector).items
        seen = (_seen(pod) for pod in pods)
        return [one for one in seen if one is not None]

    def start(self, worker: WorkerInfo) -> None:
        """See `Operator`."""
        if self._owner is None and self._config.owner_pod:
            self._owner = self._find_owner()
        body = manifest(self._config, worker, self._owner)
        try:
            self._call(self._core.create_namespaced_pod, body=body)
        except _ApiError as error:
            if error.status != 409:  # else it is there: an earlier call had been heard
                raise

    def stop(self, worker: WorkerInfo, kill: bool) -> None:
        """See `Operator`."""
        if worker.health is WorkerHealth.LEAVING and not kill:
            return
        name, grace = _name(self._config, worker), 0 if kill else _GRACE
        try:
            self._call(self._core.delete_namespaced_pod, name=name, grace_period_seconds=grace)
        except _ApiError as error:
            if error.status != 404:  # else it is gone
                raise

    def close(self) -> None:
        """See `Operator`."""

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


def load_templates(directory: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """The templates in ROLE.yaml of a directory, as `deploy/kubernetes/workers.yaml` has them mounted."""
    paths = sorted(pathlib.Path(directory).glob("*.yaml"))
    if not paths:
        raise UsageError(f"{directory} has no ROLE.yaml: it must hold a Pod's manifest for each role.")
    return {path.stem: yaml.safe_load(path.read_bytes()) for path in paths}


def labels_of(run: str) -> dict[str, str]:
    """The labels by which the Pods of a run's workers are found."""
    return {"app.kubernetes.io/managed-by": MANAGED_BY, "rlframe/run": run}


def manifest(config: KubernetesConfig, worker: WorkerInfo, owner: Mapping[str, Any] | None) -> dict[str, Any]:
    """The Pod of this worker. Raises UsageError where its role has no template."""
    if worker.role not in config.templates:
        raise UsageError(f"There is no template of the role {worker.role!r}; there are {', '.join(config.templates)}.")
    pod = copy.deepcopy(dict(config.templates[worker.role]))
    pod |= {"apiVersion": "v1", "kind": "Pod"}
    metadata, spec = pod.setdefault("metadata", {}), pod["spec"]
    metadata["name"] = _name(config, worker)
    metadata["labels"] = {
        **(metadata.get("labels") or {}),
        "app.kubernetes.io/name": "rlframe",
        **labels_of(config.run),
        "rlframe/role": worker.role,
        "rlframe/index": str(worker.index),
        "rlframe/incarnation": str(worker.incarnation),
    }
    if owner is not None:
        metadata["ownerReferences"] = [dict(owner)]
    spec["restartPolicy"] = "Never"  # a container that came back would be an incarnation that nobody counted
    spec.setdefault("terminationGracePeriodSeconds", _GRACE)
    container = spec["containers"][0]
    container["command"] = ["python", "-m", "rlframe.coordinator.workers.process"]
    which = [config.state_dir, worker.role, str(worker.index), str(worker.incarnation)]
    options = ["--address", f"$(POD_IP):{PORT}", "--silence", f"{config.silence:g}"]
    container["args"] = [*which, *options]
    container["env"] = [
        *(container.get("env") or []),
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "PYTHONUNBUFFERED", "value": "1"},
    ]
    # Its success makes `started` true, for good: until then the worker has no address.
    probe = {"tcpSocket": {"port": PORT}, "periodSeconds": 1, "failureThreshold": _STARTING}
    container.setdefault("startupProbe", probe)
    return pod


def _name(config: KubernetesConfig, worker: WorkerInfo) -> str:
    return f"{config.run}-{worker.role}-{worker.index}-{worker.incarnation}"


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


def _seen(pod: Any) -> WorkerInfo | None:
    """Read the worker from its Pod; None if it is not our Pod."""
    labels, status = pod.metadata.labels or {}, pod.status
    try:
        role = labels["rlframe/role"]
        index, incarnation = int(labels["rlframe/index"]), int(labels["rlframe/incarnation"])
    except (KeyError, ValueError):
        return None
    containers = status.container_statuses or []
    serves = status.phase == "Running" and status.pod_ip and containers and containers[0].started
    address = f"{_bracketed(status.pod_ip)}:{PORT}" if serves else None
    worker_id, health, problem = worker_id_of(role, index), WorkerHealth.LIVE, ""
    if pod.metadata.deletion_timestamp is not None:
        health, problem = WorkerHealth.LEAVING, f"{worker_id} is being deleted."
    elif status.phase in ("Failed", "Succeeded"):
        health, problem = WorkerHealth.DEAD, f"{worker_id} ended: {_how_it_ended(status)}."
    elif status.phase == "Pending" and (waits := _why_it_waits(status)):
        problem = f"{worker_id} does not start: {waits.rstrip('.')}."
    return WorkerInfo(role, index, incarnation, address, pod.spec.node_name or "", health=health, problem=problem)


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
