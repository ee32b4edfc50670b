"""Simulated experience with known contents, and a reference replay in plain Python."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from rlframe.types import (
    ENVS_PER_RANK,
    FIRST,
    LAST,
    MID,
    AgentOutput,
    ReplaySpec,
    Sequence,
    Step,
    StepSpec,
    TimeStep,
    Transition,
    global_env_ids,
    specs,
)

STEP_SPEC = StepSpec(
    observation={"id": specs.Array((), np.int64), "image": specs.Array((2, 3), np.uint8)},
    action=specs.DiscreteArray(5, dtype=np.int32),
    extras={"log_prob": specs.Array((), np.float32)},
    agent_state=(specs.Array((2,), np.float32),),
)


def fake_agent(
    kind: Any, item: Any, batch_size: int | None, capacity: int, step_spec: StepSpec = STEP_SPEC, **more: Any
) -> Any:
    """Return an object with `replay_spec` and `step_spec`. A replay buffer needs no other attributes of an agent."""
    return types.SimpleNamespace(replay_spec=ReplaySpec(kind, item, batch_size, capacity, **more), step_spec=step_spec)


class StepStream:
    """Simulated environments. Each timestep has a unique number in `observation["id"]`."""

    next_id = 0

    def __init__(self, num_envs: int, rank: int = 0, seed: int = 0, end: float = 0.2):
        self.num_envs, self.rank, self._end = num_envs, rank, end
        self._rng = np.random.default_rng([seed, rank])
        self.version = 0
        self._open = self.first(num_envs)
        self._states = np.zeros((num_envs, 2), np.float32)

    def first(self, count: int) -> TimeStep:
        """Return the first timestep of `count` environments."""
        zeros = np.zeros(count, np.float32)
        return TimeStep(np.full(count, FIRST), zeros, zeros + 1, self._observations(count))

    def restart(self, envs: np.ndarray, unless_first: bool = False) -> None:
        """Begin a new episode in `envs`, although the old episode has no LAST.

        `unless_first` excludes environments whose newest timestep is already a FIRST. In these, a replay can detect the
        new episode only if the writer claims its rank again.
        """
        if unless_first:
            envs = envs[self._open.step_type[envs] != FIRST]
        self._assign(envs, self.first(len(envs)))

    def step(self, envs: np.ndarray | None = None) -> tuple[np.ndarray, Step]:
        """Step the environments `envs` (default: all)."""
        envs = np.arange(self.num_envs) if envs is None else envs
        before = jax.tree.map(lambda array: array[envs], self._open)  # copies
        count = len(envs)
        ends, cut = self._rng.random(count) < self._end, self._rng.random(count) < 0.5
        step_type = np.where(before.step_type == LAST, FIRST, np.where(ends, LAST, MID)).astype(np.uint8)
        reward = np.where(step_type == FIRST, 0, self._rng.standard_normal(count)).astype(np.float32)
        discount = np.where((step_type == LAST) & ~cut, 0, 1).astype(np.float32)
        after = TimeStep(step_type, reward, discount, self._observations(count))
        output = AgentOutput(
            self._rng.integers(0, 5, count).astype(np.int32),
            {"log_prob": self._rng.standard_normal(count).astype(np.float32)},
        )
        state = (self._states[envs].copy(),)
        self._states[envs] += 1
        self._assign(envs, after)
        self.version += 1
        return global_env_ids(self.rank, envs), Step(before, output, state, self.version, after)

    def _observations(self, count: int) -> dict[str, np.ndarray]:
        ids = np.arange(StepStream.next_id, StepStream.next_id + count)
        StepStream.next_id += count
        return {"id": ids, "image": self._rng.integers(0, 255, (count, 2, 3)).astype(np.uint8)}

    def _assign(self, envs: np.ndarray, new: TimeStep) -> None:
        for old, value in zip(jax.tree.leaves(self._open), jax.tree.leaves(new)):
            old[envs] = value


class ReferenceReplay:
    """A reference replay buffer with Python lists. It processes one step of one environment at a time.

    Items are never evicted. `items` maps the id of an item's first observation to (arrays of the item, (rank,
    incarnation) of its writer, params version). The items are in the order of their completion.
    """

    def __init__(self, item: Transition | Sequence):
        self._item: Any = item
        self.items: dict[int, tuple[Any, tuple[int, int], int]] = {}
        self.seen: dict[
            int, list[int]
        ] = {}  # rank -> ids of the `next_timestep` observations of all its steps, in order
        self._fragments: dict[int, list[dict[str, Any]]] = {}
        self._incarnations: dict[int, int] = {}

    def claim_rank(self, num_envs: int, rank: int) -> None:
        """Register a writer, or a new incarnation of its rank."""
        self._incarnations[rank] = self._incarnations.get(rank, -1) + 1
        for env in list(self._fragments):
            if env // ENVS_PER_RANK == rank:
                del self._fragments[env]

    def add(self, env_ids: np.ndarray, step: Step) -> None:
        """Add one step for each environment in `env_ids`."""
        self.seen.setdefault(int(env_ids[0]) // ENVS_PER_RANK, []).extend(step.next_timestep.observation["id"].tolist())
        for row, env in enumerate(env_ids.tolist()):
            before, after = _row(step.timestep, row), _row(step.next_timestep, row)
            fragment = self._fragments.setdefault(env, [])
            if fragment and fragment[-1]["next"]["step_type"] != before["step_type"]:
                fragment.clear()
            fragment.append(
                {
                    **before,
                    "action": step.agent_output.action[row],
                    "log_prob": step.agent_output.extras["log_prob"][row],
                    "state": step.agent_state[0][row],
                    "version": step.params_version,
                    "next": after,
                }
            )
            complete = self._transitions if isinstance(self._item, Transition) else self._sequences
            for steps in complete(fragment):
                origin = (env // ENVS_PER_RANK, self._incarnations[env // ENVS_PER_RANK])
                self.items[int(steps[0]["observation"]["id"])] = (self._content(steps), origin, steps[0]["version"])

    def _transitions(self, fragment: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        if fragment[-1]["step_type"] == LAST:
            return
        start = len(fragment) - 1
        while start > 0 and fragment[start]["step_type"] != FIRST and fragment[start - 1]["step_type"] != LAST:
            start -= 1
        episode = fragment[start:]
        n = self._item.n_step
        if fragment[-1]["next"]["step_type"] == LAST:
            for first in range(max(0, len(episode) - n), len(episode)):
                yield episode[first:]
        elif len(episode) >= n:
            yield episode[-n:]

    def _sequences(self, fragment: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
        start = len(fragment) - self._item.length
        if start >= 0 and start % self._item.period == 0:
            yield fragment[start:]

    def _content(self, steps: list[dict[str, Any]]) -> dict[str, Any]:
        ids = [step["observation"]["id"] for step in steps] + [steps[-1]["next"]["observation"]["id"]]
        images = [step["observation"]["image"] for step in steps] + [steps[-1]["next"]["observation"]["image"]]
        if isinstance(self._item, Transition):
            gamma, total, discount = self._item.discount, 0.0, 1.0
            for k, step in enumerate(steps):
                total += gamma**k * float(step["next"]["reward"])
                discount *= gamma * float(step["next"]["discount"])
            return {
                "observation.id": ids[0],
                "observation.image": images[0],
                "action": steps[0]["action"],
                "reward": total,
                "discount": discount,
                "next_observation.id": ids[-1],
                "next_observation.image": images[-1],
                "extras.log_prob": steps[0]["log_prob"],
            }
        return {
            "observation.id": ids,
            "observation.image": images,
            "step_type": [step["step_type"] for step in steps] + [steps[-1]["next"]["step_type"]],
            "action": [step["action"] for step in steps],
            "reward": [step["next"]["reward"] for step in steps],
            "discount": [step["next"]["discount"] for step in steps],
            "extras.log_prob": [step["log_prob"] for step in steps],
            "agent_state": steps[0]["state"],
        }


def batch_items(batch: Any) -> list[dict[str, Any]]:
    """Return the arrays of each item in a batch, in the format of `ReferenceReplay.items`."""
    items = []
    for i in range(len(batch.keys)):
        item: dict[str, Any] = {}
        for name, value in batch.data._asdict().items():
            if isinstance(value, dict):
                item.update({f"{name}.{key}": leaf[i] for key, leaf in value.items()})
            else:
                item[name] = value[0][i] if name == "agent_state" else value[i]
        items.append(item)
    return items


def first_ids(batch: Any) -> np.ndarray:
    """Return the id of each item's first observation, [B]."""
    ids = batch.data.observation["id"]
    return ids if ids.ndim == 1 else ids[:, 0]


def assert_batch_matches(batch: Any, reference: ReferenceReplay) -> None:
    """Check that the reference has every item of `batch`, with equal arrays, the same writer and the same version."""
    for i, (first, item) in enumerate(zip(first_ids(batch).tolist(), batch_items(batch))):
        assert first in reference.items, f"the replay returned an unknown item, which starts at observation {first}"
        content, origin, version = reference.items[first]
        assert item.keys() == content.keys()
        for name, value in content.items():
            if name in ("reward", "discount"):
                np.testing.assert_allclose(item[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
            else:
                np.testing.assert_array_equal(item[name], value, err_msg=name)
        assert tuple(batch.keys[i, :2]) == origin
        assert batch.params_version[i] == version


def _row(timestep: TimeStep, row: int) -> dict[str, Any]:
    return {
        "step_type": timestep.step_type[row],
        "reward": timestep.reward[row],
        "discount": timestep.discount[row],
        "observation": {key: value[row].copy() for key, value in timestep.observation.items()},
    }
