"""`EnvServer`: a node that steps environments for an Actor in another process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe import handles
from rlframe.envs.adapters import env_seed
from rlframe.envs.batch import as_pool
from rlframe.envs.pool import stepping_phase
from rlframe.envs.remote import ServedSpecs, ServedStep
from rlframe.errors import EnvError, UnavailableError, UsageError
from rlframe.types import LAST, TimeStep


class EnvServer:
    """Serves environments to an Actor in another process: `lp.CourierNode(EnvServer, env_builder)`.

    An Actor accepts the server's handle as its `env_builder`. With a `SyncEnv`, one call steps all environments. With
    an `AsyncEnv`, separate calls send actions and receive timesteps. A client repeats a call if the answer was lost.
    Then the server returns the stored answer and steps no environment. The Actor that called `reset` last owns the
    environments. Calls of other Actors raise EnvError.

    Args:
        env_builder: see `Actor`.
        seed: seed for the builder. Each server of a program needs a different seed.
    """

    def __init__(self, env_builder: Any, seed: int = 0) -> None:
        self._env_builder, self._seed = env_builder, seed
        self._env = as_pool(env_builder, seed=seed)
        self._stepping = stepping_phase(self._env)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._client, self._number = "", 0  # the client and number of the latest call with an answer
        self._answer: ServedStep | UsageError | None = None
        self._failure: BaseException | None = None
        self._takeovers = 0  # number of asynchronous pools that were created again for a new Actor

    def specs(self) -> ServedSpecs:
        """Return the number of environments, and the specs of one environment."""
        env = self._env
        specs = getattr(env, "observation_spec", None), getattr(env, "action_spec", None)
        return ServedSpecs(env.num_envs, *specs, None if env.is_sync else env.wait_num)

    def reset(self, client: str, number: int) -> ServedStep | None:
        """Start new episodes for the Actor with the id `client`. Its next call must have the number `number + 1`.

        Returns:
            The FIRST timesteps. None for an asynchronous pool: then `recv` returns the FIRST timesteps.
        """
        with self._lock:
            is_other = client != self._client and self._client != ""
            if client != self._client:
                self._client, self._number = client, number - 1
            if self._env.is_sync:
                return self._answer_once(number, lambda: self._served(self._env.reset()))
            return self._answer_once(number, lambda: self._recreate_pool() if is_other else None)

    def step(self, client: str, number: int, actions: np.ndarray) -> ServedStep | None:
        """Step all environments with `actions` [num_envs, ...]. Return None if the Actor has made a newer call."""
        return self._answer_next(client, number, lambda: self._served(self._env.step(actions)))

    def send(self, client: str, number: int, env_ids: np.ndarray, actions: np.ndarray) -> None:
        """Send `actions` [n, ...] to the environments `env_ids` [n] of an asynchronous pool."""
        self._answer_next(client, number, lambda: self._env.send(env_ids, actions))

    def recv(self, client: str, number: int) -> ServedStep | None:
        """Wait for `wait_num` environments of an asynchronous pool. Return None if the Actor has made a newer call."""
        return self._answer_next(client, number, self._received)

    def run(self) -> None:
        """Serve until `stop()` is called or the program ends. Then close the environments.

        Raises:
            EnvError: an environment raised. The Actor gets the same error.
        """
        with handles.stop_with_program(self.stop):
            self._stop.wait()
        with self._lock:
            self._env.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """End `run()`. Any thread may call this method."""
        self._stop.set()

    def _answer_next(self, client: str, number: int, act: Callable[[], ServedStep | None]) -> ServedStep | None:
        """Answer a call of the Actor that owns the environments. Raise EnvError for other Actors."""
        with self._lock:
            if client != self._client or number > self._number + 1:
                raise EnvError(
                    "This EnvServer was restarted, or another Actor has reset its environments, so this "
                    "Actor's episodes have ended. An EnvServer serves one Actor at a time."
                )
            return self._answer_once(number, act)

    def _answer_once(self, number: int, act: Callable[[], ServedStep | None]) -> ServedStep | None:
        """Return the result of `act`, or raise its UsageError. For a repeated call, use the stored answer."""
        if self._stop.is_set():
            raise UnavailableError("The EnvServer has stopped.")
        if number < self._number:
            return None  # the Actor has already received the answer, since it has made a newer call
        if number > self._number:
            try:
                with self._stepping:
                    self._answer = act()
            except UsageError as error:  # an action or observation is invalid: keep serving
                self._answer = error
            except BaseException as error:  # the pool is unusable: end the node, because a restart creates a new pool
                self._failure = error
                self.stop()
                raise
            self._number = number
        if isinstance(self._answer, UsageError):
            raise self._answer
        return self._answer

    def _received(self) -> ServedStep:
        env_ids, timestep = self._env.recv()
        return self._served(timestep, env_ids)

    def _served(self, timestep: TimeStep, env_ids: np.ndarray | None = None) -> ServedStep:
        over = np.any(timestep.step_type == LAST)
        rewards = getattr(self._env, "true_rewards", None)
        return ServedStep(timestep, self._env.sums() if over else None, rewards, env_ids)

    def _recreate_pool(self) -> None:
        """Create a new asynchronous pool for a new Actor, because an asynchronous pool cannot be reset."""
        if not callable(self._env_builder):
            raise EnvError(
                "A second Actor uses this EnvServer, whose AsyncEnv cannot be reset. Pass EnvServer an env_builder "
                "that returns the pool, instead of the pool itself: then it creates a new pool for each Actor."
            )
        self._takeovers += 1
        self._env.close()
        self._env = as_pool(self._env_builder, seed=env_seed(self._seed, self._takeovers))
        self._stepping = stepping_phase(self._env)
