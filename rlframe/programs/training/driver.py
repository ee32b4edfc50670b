"""A driver makes the environment steps and updates of a run in one process, and `TrainingLoop` does everything else.

`InlineDriver` steps an Actor and a Learner in turn. `rlframe.device.driver.FusedDriver` makes many steps and updates in
one jitted call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

from rlframe.actors import Actor
from rlframe.inferencers import Inferencer
from rlframe.learners import Learner
from rlframe.replay.replay_files import ReplayFiles
from rlframe.types import Logs, ReplaySpec


class Driver(Protocol):
    """The part of a `TrainingLoop` that makes steps and updates. Its constructor restores the learner's checkpoint.

    Attributes:
        learner: The Learner. It has the parameters, and writes the checkpoints.
        spec: Spec of the replay.
        replay_is_saved: True if the learner saves the replay with its checkpoints. False if the replay needs no saving,
            or if the state of the driver contains it.
        replay_is_small: True if the replay is small enough to be saved with each checkpoint.
        has_replay: True if the driver was restored with the replay of its checkpoint.
    """

    learner: Learner
    spec: ReplaySpec
    has_replay: bool

    @property
    def env_steps(self) -> int:
        """Environment steps so far, including those before a resume."""

    @property
    def replay_is_saved(self) -> bool: ...

    @property
    def replay_is_small(self) -> bool: ...

    def advance(self, until: float, must_end: Callable[[], bool]) -> Logs | None:
        """Make the updates that are due, then at least one environment step, and all updates that are then due.

        Updates are already due if an earlier session ended between two updates. If the session must end after them, no
        step is made.

        Args:
            until: The environment step at which the caller must do something else. At least one step is made before it
                returns, and the last step can be a few steps later.
            must_end: Returns True if the session must end before the next update.

        Returns:
            The logs of the newest update, or None if there was no update.
        """

    def stats(self) -> dict[str, Any]:
        """Return the counters of `Actor.stats`."""

    def replay_stats(self) -> dict[str, int]:
        """Return the counters of the replay."""

    def get_state(self, *, with_envs: bool) -> dict[str, Any]:
        """Return the extras of a checkpoint. Without `with_envs`, a resumed run resets the environments."""

    def free_envs(self) -> None:
        """Close the environments, after the last step."""

    def close(self) -> None:
        """Close the environments and the learner."""


class InlineDriver:
    """Steps an Actor and a Learner in turn. See `Driver`.

    If the learner was restored from a checkpoint, the constructor restores the other states from the same checkpoint.
    The initial checkpoint of a run with `init_from` has no other states.

    Args:
        env_builder: Function `env_builder(seed=...)` that makes the environment pool of the actor.
        inferencer: The Inferencer.
        replay_buffer: The replay buffer.
        learner: The Learner. The driver closes it.
        seed: Seed of the environments.
        show: Function that receives what the driver does before its first update, such as "filling the replay".

    Attributes:
        actor: The Actor.
        pool: The environment pool of the actor.
    """

    pool: Any
    has_replay = False

    def __init__(
        self,
        env_builder: Any,
        inferencer: Inferencer,
        replay_buffer: Any,
        learner: Learner,
        seed: int,
        show: Callable[[str], None] = lambda activity: None,
    ) -> None:
        self.inferencer, self.replay_buffer, self.learner = inferencer, replay_buffer, learner
        self._env_builder, self._seed, self._show, self.spec = env_builder, seed, show, replay_buffer.spec
        self._one_update_per_step = self.spec.samples_per_insert is None and self.spec.kind != "queue"
        self.actor = self._make_actor()
        self._may_learn_first = self.has_replay and not self._one_update_per_step

    def _make_actor(self) -> Actor:
        """Make the Actor. If the learner was restored from a checkpoint, restore the actor and the inferencer too."""

        def build(seed: int) -> Any:
            self.pool = self._env_builder(seed=seed)
            return self.pool

        make = functools.partial(Actor, build, self.inferencer, self.replay_buffer, seed=self._seed)
        if self.learner.restored is None or self.learner.restored.extras is None:
            return make()
        saved, self.has_replay = self.learner.restored
        self.inferencer.set_state(saved["inferencer"])
        if self.has_replay and saved["actor"]["env"] is not None:
            # Continue in the middle of the episodes, with the restored environments and incomplete items.
            actor = make(rank=0, incarnation=saved["incarnation"])
        else:
            # Claim a new incarnation. This removes incomplete items, and the environments get new seeds.
            incarnation = -1
            while incarnation < saved["incarnation"]:
                _, incarnation = self.replay_buffer.claim_rank(rank=0)
            actor = make(rank=0)
        try:
            actor.set_state(saved["actor"])
        except BaseException:
            actor.close()
            raise
        return actor

    @property
    def env_steps(self) -> int:
        """See `Driver`."""
        return self.actor.env_steps

    @property
    def replay_is_saved(self) -> bool:
        """See `Driver`."""
        return self.replay_buffer.is_saved_by_learner

    @property
    def replay_is_small(self) -> bool:
        """See `Driver`."""
        return ReplayFiles.is_small(self.replay_buffer)

    def advance(self, until: float, must_end: Callable[[], bool]) -> Logs | None:
        """See `Driver`. Make one step of each environment."""
        logs = None
        if self._may_learn_first:
            self._may_learn_first = False
            logs = self._learn(must_end)
            if must_end():
                return logs
        self.actor.step()
        return self._learn(must_end) or logs

    def _learn(self, must_end: Callable[[], bool]) -> Logs | None:
        """Make the updates that are due. Return the logs of the newest one, if any."""
        logs, batch = None, self.replay_buffer.sample()
        if not self.learner.learner_steps:
            self._show("filling the replay" if batch is None else "making the first update")
        while batch is not None:
            logs = self.learner.step(batch)
            batch = None if self._one_update_per_step or must_end() else self.replay_buffer.sample()
        return logs

    def stats(self) -> dict[str, Any]:
        """See `Driver`."""
        return self.actor.stats()

    def replay_stats(self) -> dict[str, int]:
        """See `Driver`."""
        return self.replay_buffer.stats()

    def get_state(self, *, with_envs: bool) -> dict[str, Any]:
        """See `Driver`."""
        return {
            "actor": self.actor.get_state(with_envs=with_envs),
            "incarnation": self.actor.incarnation,
            "inferencer": self.inferencer.get_state(),
        }

    def free_envs(self) -> None:
        """See `Driver`."""
        self.actor.close()

    def close(self) -> None:
        """See `Driver`."""
        self.actor.close()
        self.learner.close()
