"""The recommended pool, agent and training command for a checked environment."""

from __future__ import annotations

import json
import shlex
from typing import Any

import numpy as np
from dm_env import specs

from rlframe.envs.codec import Codec
from rlframe.errors import UsageError
from rlframe.programs.env_check.copies import Subject
from rlframe.programs.env_check.report import Findings, Recommendation
from rlframe.programs.env_check.speed import fastest_pool, num_workers
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.make_experiment import make_experiment
from rlframe.programs.presets import find_preset
from rlframe.programs.topologies.makers import make_agent
from rlframe.types import MultiDiscreteArray

_SLOW = 1_000.0  # steps per second below which an agent that reuses its steps is recommended
_LARGE = 10.0  # absolute value above which observations need normalization


def recommend(
    subject: Subject,
    codec: Codec,
    speeds: dict[str, float],
    largest: float,
    options: dict[str, Any],
    findings: Findings,
) -> Recommendation | None:
    """Return the recommended pool and training command. Return None, and add an error, if no agent can act here.

    Args:
        subject: the environment.
        codec: its codec.
        speeds: steps per second of each pool.
        largest: the largest absolute value in observations that are vectors.
        options: `env_kwargs` and `num_envs`, as the user gave them.
        findings: receives the problem.
    """
    kind = fastest_pool(speeds)
    workers = num_workers(options["num_envs"] or Experiment.num_envs) if kind in ("thread", "process") else None
    refused: UsageError | None = None
    for agent in _agents(codec.action_spec, subject, speeds[kind]):
        preset = find_preset("auto", agent, subject.name or "")
        chosen = {name: value for name, value in options.items() if value}
        chosen |= {"topology": "fused"} if kind == "jax" else {"env_type": kind}
        chosen |= {} if workers is None else {"num_workers": workers}
        if preset is None and largest > _LARGE:
            chosen["normalize_observations"] = True
        try:
            experiment = make_experiment(agent, subject.name or subject.env, **chosen)
            make_agent(experiment, codec)
        except UsageError as error:
            refused = refused or error
            continue
        return Recommendation(kind, workers, agent, _command(subject, agent, {**chosen, "steps": experiment.steps}))
    findings.error(
        "action",
        "no agent of rlframe can act in this environment",
        expected="a Discrete, MultiDiscrete or bounded Box action space",
        received=str(refused),
        fix="Wrap the environment so that its action space is one of these.",
    )
    return None


def _agents(spec: Any, subject: Subject, speed: float) -> list[str]:
    """Return agents for an action space, best first. Agents with a preset for the environment come first."""
    if isinstance(spec, MultiDiscreteArray) or spec.dtype.kind != "f":
        agents = ["ppo", "dqn"] if not isinstance(spec, specs.DiscreteArray) or speed >= _SLOW else ["dqn", "ppo"]
    else:
        agents = (
            ["ppo", "sac"] if speed >= _SLOW or not np.isfinite([spec.minimum, spec.maximum]).all() else ["sac", "ppo"]
        )
    return sorted(agents, key=lambda agent: find_preset("auto", agent, subject.name or "") is None)


def _command(subject: Subject, agent: str, chosen: dict[str, Any]) -> str:
    """Return the command for a shell, or Python code for an environment without a name."""
    if subject.name is None:
        given = "".join(f", {name}={value!r}" for name, value in chosen.items())
        label = subject.label if subject.label.isidentifier() else "make_env"
        return f"rlframe.train({agent!r}, {label}{given})"
    words = ["rlframe", "train", "--agent", agent, "--env", subject.name]
    for name, value in chosen.items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return shlex.join(words)
