"""The operators of the topology elastic: what makes each, from what the run was told."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from rlframe.coordinator.messages import ROLES
from rlframe.coordinator.operators.base import Operator
from rlframe.coordinator.operators.ray import RayOperator
from rlframe.coordinator.operators.static import StaticOperator
from rlframe.coordinator.workers.process import SILENCE
from rlframe.coordinator.workers.records import MakeWorker, save_workers
from rlframe.engines import Engine
from rlframe.engines.launching.placement import NO_ACCELERATOR, ON_CPU
from rlframe.errors import UsageError
from rlframe.interprocess.processes import ProcessId, this_process
from rlframe.programs import naming
from rlframe.programs.run import Run

# Those whose workers are on machines that share nothing with the launcher's but the run's directory.
ELSEWHERE = ("kubernetes", "static")


def add_operator(engine: Engine, run: Run, makers: Mapping[str, MakeWorker]) -> Callable[[], Operator]:
    """What makes, in the coordinator's process, the operator of workers that these make."""
    config = run.topology
    if config.operator == "static":
        save_workers(coordinator_dir(run.path), makers)
        return functools.partial(StaticOperator, read_addresses(config.workers))
    if config.operator == "kubernetes":
        return _add_pods(run, makers)
    if config.operator_name == "ray":
        most = {"learner": 1, "collector": config.max_actors, "evaluator": 0}  # evaluators work now and then
        return functools.partial(RayOperator, engine.add_workers(makers, most))
    # The learner's, as this process has them; the coordinator is without.
    variables = {name: os.environ.get(name) for name in ON_CPU}
    if "learner" not in config.accelerators:
        variables |= NO_ACCELERATOR
    return functools.partial(_make_operator, run, makers, this_process(), variables)


def check_elsewhere(config: Any) -> None:
    """Raises UsageError where what an `Elastic` says of workers on other machines does not fit together."""
    named = config.operator in ELSEWHERE
    for name in ("workers", "replay_at"):
        if (getattr(config, name) is not None) != named:
            needs = "needs" if named else "does not read"
            raise UsageError(
                f"The operator {config.operator_name} {needs} {name}: --{name.replace('_', '-')} goes with --operator "
                f"{' or '.join(ELSEWHERE)}."
            )
    if not named:
        return
    if config.replay_kind != "reverb" or "ports" not in config.engine_class.options:
        raise UsageError(
            f"The operator {config.operator} has workers on other machines, which call by Courier and reach a Reverb "
            f"server: --engine launchpad --replay reverb, got {config.engine_name} and {config.replay_kind}."
        )
    address_parts(config.replay_at)


def address_parts(address: str) -> tuple[str, int]:
    """The host and the port of "HOST:PORT". Raises UsageError where it is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UsageError(f"An address is HOST:PORT, where PORT is 1 to 65535; got {address!r}.")
    return host, int(port)


def read_addresses(path: str) -> dict[Any, list[str]]:
    """The addresses of a static operator's workers, by role, from a JSON file.

    Raises:
        UsageError: it cannot be read, or says something else.
    """
    form = 'It must hold {"learner": ["HOST:PORT"], "collector": ["HOST:PORT", ...], "evaluator": [...]}.'
    try:
        read = json.loads(pathlib.Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"--workers {path} cannot be read: {error}. {form}") from error
    if not isinstance(read, dict) or not all(isinstance(each, list) for each in read.values()):
        raise UsageError(f"--workers {path} holds {json.dumps(read)[:200]}. {form}")
    for role, addresses in read.items():
        if role not in ROLES:
            raise UsageError(f"--workers {path} has the role {role!r}; there are {', '.join(ROLES)}.")
        for address in addresses:
            address_parts(str(address))
    for role in ("learner", "collector"):
        if not read.get(role):
            raise UsageError(f"--workers {path} has no {role}. {form}")
    return read


def coordinator_dir(run_dir: pathlib.Path) -> pathlib.Path:
    """Where the coordinator of a run keeps its journal, and its workers their logs."""
    return run_dir / "coordinator"


def _silence(run: Run) -> float:
    """Seconds without a call after which workers end: a coordinator that hangs, and is started again, finds them."""
    return SILENCE + 2.0 * float(run.topology.hang_timeout)


def _make_operator(
    run: Run, makers: Mapping[str, MakeWorker], owner: ProcessId, learner_env: dict[str, str | None]
) -> Operator:
    """An operator of processes of this machine.

    Args:
        run: the session.
        makers: of the workers, by role.
        owner: the launcher, with which all workers end.
        learner_env: environment variables of the learner that this process has not, or has others of.
    """
    path = coordinator_dir(run.path)
    save_workers(path, makers)
    operator_cls = naming.operator_class(run.topology.operator_name)
    operator: Operator = operator_cls(
        path, owner=owner, silence=_silence(run), env={"learner": learner_env}, logs=run.directory.logs
    )
    return operator


def _add_pods(run: Run, makers: Mapping[str, MakeWorker]) -> Callable[[], Operator]:
    """Pods of this session alone: those of one before end when nobody calls them."""
    from rlframe.coordinator.operators.kubernetes import KubernetesConfig, KubernetesOperator, load_templates

    session = hashlib.sha256(run.session.encode()).hexdigest()[:6]
    state_dir = coordinator_dir(run.path) / session
    config = KubernetesConfig(
        run=f"{run.path.name}-{session}",
        namespace=os.environ.get("POD_NAMESPACE", "default"),
        state_dir=str(state_dir),
        templates=load_templates(run.topology.workers),
        owner_pod=os.environ.get("POD_NAME", ""),
        silence=_silence(run),
    )
    save_workers(state_dir, makers)
    return functools.partial(KubernetesOperator, config)
