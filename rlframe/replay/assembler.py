"""Completing items outside of a replay, for stores that keep whole items: a server's, or one of your own."""

from __future__ import annotations

import dataclasses

import numpy as np

from rlframe.replay import steps
from rlframe.replay.steps import StepStore, Writers
from rlframe.replay.tables import QueueTable
from rlframe.replay.timeline import Fragments, Timeline
from rlframe.types import AgentSpecs, Batch, Sequence, Step

_SLOWER = 8  # an environment may be so many times slower than its actor's others without losing its open items


class ItemAssembler:
    """Completes the items of this process's writers, and gives them up as soon as they are complete.

    It knows all that is difficult about items: n-step returns, episodes that end, environments that answer in any
    order, fragments that break off. One thread at a time.

    Args:
        agent: an Agent (anything with `replay_spec` and `step_spec`).
    """

    def __init__(self, agent: AgentSpecs) -> None:
        self._agent = agent
        self._writers = Writers[Fragments]()
        self._stores: dict[int, tuple[StepStore, QueueTable]] = {}
        self._next: dict[int, int] = {}

    def open(self, rank: int, incarnation: int, num_envs: int) -> None:
        """Takes a writer in, or takes it in again: what its predecessor left open is dropped."""
        spec = self._agent.replay_spec
        length = spec.item.length if isinstance(spec.item, Sequence) else spec.item.n_step
        spec = dataclasses.replace(spec, capacity=_SLOWER * num_envs * (length + 4))
        slots, chunk = steps.sizes(spec, num_envs, num_envs)
        timeline = Timeline(slots, chunk)
        table = QueueTable(timeline)
        store = StepStore(spec, self._agent.step_spec, timeline, table, num_envs, None)
        self._stores[rank], self._next[rank] = (store, table), 0
        self._writers.put(store.open(rank, incarnation, num_envs, origin=0))

    def drop(self, rank: int) -> None:
        """Forgets a writer, and what it left open."""
        self._writers.drop(rank)

    def rank_of(self, env_ids: np.ndarray) -> int:
        """The rank of the writer that `env_ids` belong to. Raises `UsageError` where there is no such writer."""
        return self._writers.find(env_ids)[0].rank

    def add(self, env_ids: np.ndarray, step: Step) -> Batch | None:
        """Adds a step, and returns the items that it completed, the oldest first; None where there are none.

        Their keys number the items of each writer (see `renumber`). Their `probabilities` mean nothing.
        """
        writer, envs = self._writers.find(env_ids)
        store, table = self._stores[writer.rank]
        store.add(writer, envs, step)
        count = table.size
        if not count:
            return None
        starts, probabilities = table.draw(count)
        data, versions = store.read(store.timeline.slot(starts))
        keys = np.full((count, 3), (writer.rank, writer.incarnation, 0), np.int64)
        keys[:, 2] = np.arange(self._next[writer.rank], self._next[writer.rank] + count)
        self._next[writer.rank] += count
        return Batch(data, keys, probabilities, versions)

    def renumber(self, batch: Batch, at_least: int) -> None:
        """Has the items that `add` just gave, and those to come, be numbered from `at_least` on, if that is higher."""
        more = at_least - int(batch.keys[0, 2])
        if more > 0:
            batch.keys[:, 2] += more
            self._next[int(batch.keys[0, 0])] += more
