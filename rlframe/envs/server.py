"""EnvServer: environments on a node of their own."""

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

    An Actor takes its handle as `env_builder`. Of a `SyncEnv`, one call steps all environments; of an `AsyncEnv`, calls
    send actions and receive what is ready. A call that is repeated, as its answer was lost, steps nothing again.
    The Actor that reset last has the environments: any other gets an EnvError.

    Args:
        env_builder: as for `Actor`.
        seed: for the builder. Servers of one program need different ones.
    """

    def __init__(self, env_builder: Any, seed: int = 0) -> None:
        self._env_builder, self._seed = env_builder, seed
        self._env = as_pool(env_builder, seed=seed)
        self._stepping = stepping_phase(self._env)
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._client, self._number = "", 0  # of the call that was answered last
        self._answer: ServedStep | UsageError | None = None
        self._failure: BaseException | None = None
        self._takeovers = 0  # of an asynchronous pool, by an Actor after the first

    def specs(self) -> ServedSpecs:
        """How many environments there are, and the specs of one."""
        env = self._env
        specs = getattr(env, "observation_spec", None), getattr(env, "action_spec", None)
        return ServedSpecs(env.num_envs, *specs, None if env.is_sync else env.wait_num)

    def reset(self, client: str, number: int) -> ServedStep | None:
        """Start new episodes for the Actor with the id `client`. Its next call has the number `number + 1`.

        An asynchronous pool has nothing to answer yet: `recv` gives the new episodes.
        """
        with self._lock:
            is_other = client != self._client and self._client != ""
            if client != self._client:
                self._client, self._number = client, number - 1
            if self._env.is_sync:
                return self._once(number, lambda: self._served(self._env.reset()))
            return self._once(number, lambda: self._renew() if is_other else None)

    def step(self, client: str, number: int, actions: np.ndarray) -> ServedStep | None:
        """Steps all environments with `actions` [num_envs, ...]; a call that comes late, None."""
        return self._answer_next(client, number, lambda: self._served(self._env.step(actions)))

    def send(self, client: str, number: int, env_ids: np.ndarray, actions: np.ndarray) -> None:
        """Gives `actions` [n, ...] to the environments `env_ids` [n] of an asynchronous pool."""
        self._answer_next(client, number, lambda: self._env.send(env_ids, actions))

    def recv(self, client: str, number: int) -> ServedStep | None:
        """Waits for `wait_num` environments of an asynchronous pool; a call that comes late, None."""
        return self._answer_next(client, number, self._received)

    def run(self) -> None:
        """Serves until `stop()`, or the end of the program whose node this is, and closes the environments.

        Raises:
            EnvError: an environment raised. It was told to the Actor as well.
        """
        with handles.stop_with_program(self.stop):
            self._stop.wait()
        with self._lock:
            self._env.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Ends `run()`. Any thread may call it."""
        self._stop.set()

    def _answer_next(self, client: str, number: int, act: Callable[[], ServedStep | None]) -> ServedStep | None:
        """Answer a call of the Actor that has the environments, as `_once` does. Raise EnvError for any other one."""
        with self._lock:
            if client != self._client or number > self._number + 1:
                raise EnvError(
                    "This EnvServer was restarted, or another Actor has reset its environments since, so the step has "
                    "no episode to belong to. An EnvServer serves one Actor at a time."
                )
            return self._once(number, act)

    def _once(self, number: int, act: Callable[[], ServedStep | None]) -> ServedStep | None:
        """Return what `act` returns, or raise its UsageError; for a repeated call the same again, without `act`."""
        if self._stop.is_set():
            raise UnavailableError("The EnvServer has stopped.")
        if number < self._number:
            return None  # the Actor has the answer, and made its next call
        if number > self._number:
            try:
                with self._stepping:
                    self._answer = act()
            except UsageError as error:  # an action or an environment's answer does not fit: the server goes on
                self._answer = error
            except BaseException as error:  # only a new pool can go on: the node ends, to be started again
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

    def _renew(self) -> None:
        """Makes a new pool: an asynchronous one cannot be reset, and its environments are amid another's episodes."""
        if not callable(self._env_builder):
            raise EnvError(
                "A second Actor uses this EnvServer, whose AsyncEnv cannot start again. Give EnvServer an env_builder "
                "that makes the pool, instead of the pool: then it makes a new one for each Actor."
            )
        self._takeovers += 1
        self._env.close()
        self._env = as_pool(self._env_builder, seed=env_seed(self._seed, self._takeovers))
        self._stepping = stepping_phase(self._env)
