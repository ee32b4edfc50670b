"""What `SyncEnv` and `AsyncEnv` have in common: a pool that is opened once and closed once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dm_env import specs

from rlframe.errors import UsageError

if TYPE_CHECKING:
    from typing_extensions import Self


class PoolHandle:
    """Holds a pool, shows its specs, and closes it."""

    def _attach(self, pool: Any) -> None:
        self._pool = pool
        self._closed = False
        self._checked = False  # that the pool is open and that the actions are as the spec says
        self.num_envs: int = pool.num_envs
        self.observation_spec = pool.observation_spec
        self.action_spec: specs.Array = pool.action_spec

    def close(self) -> None:
        """Ends every thread and process of the pool. May be called twice."""
        if not self._closed:
            self._closed, self._checked = True, False
            self._pool.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("This environment pool is closed: make a new one.")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
