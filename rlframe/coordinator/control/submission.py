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

TOPOLOGY = "elastic"
_OWN = ("agent", "env", "preset", "network_config")  # that are looked at before the others


class Submission(NamedTuple):
    what: dict[str, str]  # agent and env
    config: str  # what a file for `rlframe train --config` holds


def read_submission(spec: dict[str, Any]) -> Submission:
    """What a client asks for.

    Args:
        spec: `agent`, `env`, `preset`, `network_config` (an object), and any other field of an experiment or of the
            agent's config. The topology is elastic.

    Raises:
        FieldError: a field is unknown or its value cannot be; it names the field.
    """
    agent, env, preset = (_text(spec, name, default) for name, default in _TEXTS.items())
    with _naming("agent"):
        experiment = experiment_class(agent)
        of_agent = field_types(naming.agent_class(agent).config_cls)  # type: ignore[attr-defined]
    hints = {**of_agent, **field_types(experiment)}
    for hidden in ("agent_config", *_OWN):
        hints.pop(hidden, None)
    fields = {}
    for name, value in spec.items():
        if name in _OWN:
            continue
        if name not in hints:
            raise FieldError(
                name[:100], f"There is no field {name[:100]!r} in an experiment with {agent}.{suggest(name, hints)}"
            )
        with _naming(name):
            fields[name] = convert(hints[name], value, name)
    if fields.setdefault("topology", TOPOLOGY) != TOPOLOGY:
        raise FieldError("topology", f"A job of this service has the topology {TOPOLOGY}, not {fields['topology']}.")
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
    return Submission({"agent": agent, "env": env}, json.dumps(content, indent=2) + "\n")


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
            told = [name for name in self.among if name in message]  # the first is what the sentence is about
            named = self.field or min(told, key=message.index, default=None)
            raise FieldError(named, message) from error


def _text(spec: dict[str, Any], name: str, default: str) -> str:
    value = spec.get(name, default)
    if not isinstance(value, str) or not value or len(value) > 1000:
        raise FieldError(name, f"{name} must be a name, got {value!r:.100}.")
    return value
