"""What `SyncEnv` and `AsyncEnv` have in common: a pool that is opened once and closed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dm_env import specs

from rlframe.envs.actions import ActionCheck
from rlframe.envs.finite import FiniteCheck
from rlframe.envs.group import ANSWER_TIMEOUT
from rlframe.errors import UsageError
from rlframe.metrics.sums import Sums

if TYPE_CHECKING:
    from typing_extensions import Self


class PoolHandle:
    """Holds a pool, shows its specs, and closes it."""

    def _attach(
        self,
        pool: Any,
        answer_timeout: float = ANSWER_TIMEOUT,
        check_finite: bool | None = None,
        is_native: bool = False,
    ) -> None:
        self._pool = pool
        self._closed = False
        self.num_envs: int = pool.num_envs
        self.observation_spec = pool.observation_spec
        self.action_spec: specs.Array = pool.action_spec
        self.answer_timeout = answer_timeout
        self._check_actions = ActionCheck(self.action_spec, every_value=is_native)
        checks = not is_native if check_finite is None else check_finite
        self._check_finite = FiniteCheck(self.observation_spec) if checks else None

    def sums(self) -> Sums:
        """What the environments logged since they were made: name -> [sum, count]. Any thread may ask, at any time."""
        return self._pool.sums()

    def progress(self) -> Any:
        """Compares as equal for as long as no environment gets on (always, of EnvPool). Any thread may ask."""
        return self._pool.progress()

    def close(self) -> None:
        """Ends every thread and process of the pool. May be called twice."""
        if not self._closed:
            self._closed = True
            self._pool.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("This environment pool is closed: make a new one.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
