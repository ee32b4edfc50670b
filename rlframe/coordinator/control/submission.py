"""What is submitted: the fields of `rlframe train`, checked before anything is queued."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

from rlframe.coordinator.control.errors import FieldError
from rlframe.errors import UsageError, suggest
from rlframe.programs import naming
from rlframe.programs.experiment import experiment_class, make_experiment
from rlframe.programs.jsonable import convert, field_types, from_jsonable, to_jsonable

MIN_ACTORS, MAX_ACTORS = 1, 8
_MOST_ACTORS = 10_000
_OWN = ("agent", "env", "preset", "min_actors", "max_actors", "network_config")
_ELSEWHERE = {
    "topology": "it is elastic",
    "engine": "workers are the operator's",
    "num_actors": "min_actors and max_actors say it",
}


class Submission(NamedTuple):
    what: dict[str, str]  # agent and env
    config: str  # what a file for `rlframe train --config` holds
    min_actors: int
    max_actors: int


def read_submission(spec: dict[str, Any]) -> Submission:
    """What a client asks for.

    Args:
        spec: `agent`, `env`, `preset`, `min_actors` and `max_actors`, `network_config` (an object), and any other field
            of an experiment or of the agent's config.

    Raises:
        FieldError: a field is unknown or its value cannot be; it names the field.
    """
    agent, env, preset = (_text(spec, name, default) for name, default in _TEXTS.items())
    least = _actors(spec, "min_actors", MIN_ACTORS)
    most = _actors(spec, "max_actors", max(MAX_ACTORS, least))
    if least > most:
        raise FieldError("min_actors", f"min_actors must be at most max_actors={most}, got {least}.")
    with _naming("agent"):
        experiment = experiment_class(agent)
        of_agent = field_types(naming.agent_class(agent).config_cls)  # type: ignore[attr-defined]
    hints = {**of_agent, **field_types(experiment)}
    for hidden in ("agent_config", *_OWN, *_ELSEWHERE):
        hints.pop(hidden, None)
    fields = {}
    for name, value in spec.items():
        if name in _OWN:
            continue
        if name in _ELSEWHERE:
            raise FieldError(name, f"{name} is not for a job of this service: {_ELSEWHERE[name]}.")
        if name not in hints:
            raise FieldError(
                name[:100], f"There is no field {name[:100]!r} in an experiment with {agent}.{suggest(name, hints)}"
            )
        with _naming(name):
            fields[name] = convert(hints[name], value, name)
    if spec.get("network_config") is not None:
        with _naming("network_config"):
            network = naming.network_config_class(fields.get("network"))
            if network is None:
                raise UsageError("network_config is for a network that `network` names.")
            fields["network_config"] = from_jsonable(network, spec["network_config"], "network_config")
    with _naming(None, among=[*fields, *_OWN]):
        described = make_experiment(agent, env, preset=preset, **fields)
        values = to_jsonable(described)
    content = {"experiment": {**values, "agent": naming.absolute_name(agent), "env": naming.absolute_name(env)}}
    if values.get("network") is not None:
        content["experiment"]["network"] = naming.absolute_name(values["network"])
    return Submission({"agent": agent, "env": env}, json.dumps(content, indent=2) + "\n", least, most)


_TEXTS = {"agent": "ppo", "env": "CartPole-v1", "preset": "auto"}


@dataclasses.dataclass
class _naming:
    """Has errors name the field that they are about."""

    field: str | None
    among: list[str] = dataclasses.field(default_factory=list)

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, FieldError) or error is None:
            return
        if isinstance(error, (UsageError, TypeError, ValueError)):
            message = str(error)
            named = self.field or next((name for name in self.among if name in message), None)
            raise FieldError(named, message) from error


def _text(spec: dict[str, Any], name: str, default: str) -> str:
    value = spec.get(name, default)
    if not isinstance(value, str) or not value or len(value) > 1000:
        raise FieldError(name, f"{name} must be a name, got {value!r:.100}.")
    return value


def _actors(spec: dict[str, Any], name: str, default: int) -> int:
    value = spec.get(name, default)
    if type(value) is not int or not 1 <= value <= _MOST_ACTORS:
        raise FieldError(name, f"{name} must be between 1 and {_MOST_ACTORS}, got {value!r:.100}.")
    return value
