"""Compute the number of updates of a run, and the step of the first update. Refuse a run that makes no updates."""

from __future__ import annotations

import dataclasses
import logging
import math

from rlframe.agents import Agent
from rlframe.agents.schedules import known_values
from rlframe.errors import UsageError
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import registry
from rlframe.replay.rate_limiter import ROUNDS_AHEAD, samples_of_rounds
from rlframe.types import ReplaySpec, Sequence

_log = logging.getLogger(__name__)


def total_learner_steps(spec: ReplaySpec, steps: int, num_envs: int) -> int:
    """Return the number of updates in a run of `steps` environment steps. Schedules, such as epsilon's, end there.

    The number is approximate, because the first step after an episode's end ignores its action, but adds an item.
    """
    period = spec.item.period if isinstance(spec.item, Sequence) else 1
    items = steps / period
    if spec.samples_per_insert is None:
        return max(1, int(items / (spec.batch_size or num_envs)))
    waits = min(spec.min_size, items)
    return max(1, int((items - waits) * spec.samples_per_insert / (spec.batch_size or num_envs)))


def updates_between(spec: ReplaySpec, first: int, last: int, num_envs: int) -> int:
    """Return the number of updates between the environment steps `first` and `last` of a run."""
    return total_learner_steps(spec, last, num_envs) - total_learner_steps(spec, first, num_envs)


def min_updates(spec: ReplaySpec, steps: int, num_envs: int) -> int:
    """Return the smallest number of updates that `steps` environment steps cause if no data is lost.

    It is less than `total_learner_steps` for three reasons. Writers can be ahead of the learner. The first sequence of
    an environment needs more steps than later sequences. Restarts of the learner can lose a tenth of the updates.
    """
    late = num_envs * (spec.item.length - spec.item.period) if isinstance(spec.item, Sequence) else 0
    ahead = samples_of_rounds(spec, num_envs, ROUNDS_AHEAD) / (spec.batch_size or num_envs)
    return int(0.9 * (total_learner_steps(spec, max(steps - late, 0), num_envs) - ahead))


def steps_until_first_update(spec: ReplaySpec, num_envs: int) -> int:
    """Return the number of environment steps after which the first update is possible.

    In practice, the first update can be a few steps earlier, because short episodes add more items.
    """
    batch = spec.batch_size or num_envs
    items = max(spec.min_size, batch) if spec.kind == "queue" else spec.min_size
    rounds = math.ceil(items / num_envs)  # number of items from each environment
    item = spec.item
    steps = item.length + (rounds - 1) * item.period if isinstance(item, Sequence) else rounds + item.n_step - 1
    return steps * num_envs


def warn_if_no_updates(spec: ReplaySpec, made: int, steps: int, num_envs: int) -> None:
    """Log a warning if a run made no update."""
    if made == 0:
        _log.warning(
            "The run made no update in %d environment steps. The first update needs %d. Run for more steps, or start "
            "learning earlier.",
            steps,
            steps_until_first_update(spec, num_envs),
        )


def check_updates(experiment: Experiment, agent: Agent) -> str:
    """Return a sentence with the number of updates that a new run will make. For a language model, return "".

    Raises:
        UsageError: The run would make no update, the agent would never explore, or the agent does not support the
            number of environments.
    """
    if experiment.topology_config.learns_from != "steps":
        return ""
    _check_explores(experiment, agent)
    agent.check_num_envs(experiment.num_envs)
    spec = agent.replay_spec
    first = steps_until_first_update(spec, experiment.num_envs)
    # A run steps all environments at the same time, so it can exceed `steps` by up to num_envs - 1.
    if experiment.steps <= first - experiment.num_envs:
        known = {field.name for field in dataclasses.fields(experiment.agent_config)}
        fields = ("unroll_length", "batch_size") if spec.kind == "queue" else ("min_replay_size",)
        earlier = [f"--{name.replace('_', '-')}" for name in fields if name in known]
        if spec.batch_size is None:
            earlier.append("--num-envs")
        less = f", or lower {' or '.join(earlier)}" if earlier else ", or lower the sizes in the agent's replay_spec"
        raise UsageError(
            f"A run of {experiment.steps:,} environment steps would make no update. The first update needs {first:,}. "
            f"Raise --steps{less}."
        )
    items, after = spec.batch_size or experiment.num_envs, f"the first after {first:,} environment steps"
    if spec.kind != "queue" and spec.samples_per_insert is None:
        return f"Updates of {items:,} items each, as fast as possible, {after}."
    updates = total_learner_steps(spec, experiment.steps, experiment.num_envs)
    return f"About {updates:,} update{'s' * (updates != 1)} of {items:,} items each, {after}."


def _check_explores(experiment: Experiment, agent: Agent) -> None:
    """Raise UsageError if a built-in agent never explores: epsilon is 0, and the network has no noise."""
    config = experiment.agent_config
    chances = known_values(config, "epsilon") if hasattr(config, "epsilon") else ()
    network = getattr(getattr(agent, "agent", agent), "network", None)  # `Normalized` wraps an agent
    if (
        experiment.agent in registry.AGENTS
        and chances
        and not any(chances)
        and getattr(network, "sample", None) is None
    ):
        raise UsageError(
            f"{experiment.agent} would never explore: epsilon is {config.epsilon}, and its network has no noise. Raise "
            "--epsilon, or use a noisy network: --network mlp --network.noisy 0.5."
        )
