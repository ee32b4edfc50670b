"""EnvServer: environments on a node of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.envs.pool import stepping
from rlframe.envs.remote import ServedSpecs, ServedStep
from rlframe.envs.sync import as_pool
from rlframe.errors import EnvError, UnavailableError, UsageError
from rlframe.types import LAST, TimeStep


class EnvServer:
    """Serves environments to an Actor in another process: `lp.CourierNode(EnvServer, env_builder)`.

    An Actor takes its handle as `env_builder`; one call steps the whole pool, and one that is repeated, as its answer
    was lost, steps nothing again. The Actor that reset last is the one that steps: any other gets an EnvError.

    Args:
        env_builder: as for `Actor`; of a pool that steps together.
        seed: for the builder. Servers of one program need different ones.
    """

    def __init__(self, env_builder: Any, seed: int = 0) -> None:
        self._env = as_pool(env_builder, seed=seed)
        if not self._env.is_sync:
            raise UsageError(
                "An EnvServer needs a synchronous pool (SyncEnv); its env_builder gave an asynchronous one."
            )
        self._stepping = stepping(self._env)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._client, self._number = "", 0  # of the call that was answered last
        self._answer: ServedStep | None = None
        self._failure: BaseException | None = None

    def specs(self) -> ServedSpecs:
        """How many environments there are, and the specs of one."""
        env = self._env
        return ServedSpecs(env.num_envs, getattr(env, "observation_spec", None), getattr(env, "action_spec", None))

    def reset(self, client: str, number: int) -> ServedStep | None:
        """Starts new episodes, for the Actor that `client` stands for; its calls go on from `number`."""
        with self._lock:
            if client != self._client:
                self._client, self._number = client, number - 1
            return self._once(number, self._env.reset)

    def step(self, client: str, number: int, actions: np.ndarray) -> ServedStep | None:
        """Steps all environments with `actions` [num_envs, ...]; a call that comes late, None."""
        with self._lock:
            if client != self._client or number > self._number + 1:
                raise EnvError(
                    "This EnvServer was restarted, or another Actor has reset its environments since, so the step has "
                    "no episode to belong to. An EnvServer serves one Actor at a time."
                )
            return self._once(number, lambda: self._env.step(actions))

    def run(self) -> None:
        """Serves until `stop()`, or the end of the Launchpad program whose node this is, and closes the environments.

        Raises:
            EnvError: an environment raised. It was told to the Actor as well.
        """
        with handles.stopped_by_program(self.stop):
            self._stop.wait()
        with self._lock:
            self._env.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Ends `run()`. Any thread may call it."""
        self._stop.set()

    def _once(self, number: int, act: Callable[[], TimeStep]) -> ServedStep | None:
        if self._stop.is_set():
            raise UnavailableError("The EnvServer has stopped.")
        if number < self._number:
            return None  # nobody waits for it: the call that it repeats was answered
        if number > self._number:
            try:
                with self._stepping:
                    timestep = act()
            except UsageError:
                raise
            except BaseException as error:  # a new pool is needed: whoever restarts the node brings one
                self._failure = error
                self.stop()
                raise
            over = np.any(timestep.step_type == LAST)
            rewards = getattr(self._env, "true_rewards", None)
            self._answer, self._number = ServedStep(timestep, self._env.sums() if over else None, rewards), number
        return self._answer
