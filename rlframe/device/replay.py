"""The replays of the topology `fused` in device memory: what `Rounds` needs from `UnrollQueue` and `StepRing`."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, Protocol

import jax

from rlframe.types import AgentState, Batch, TimeStep, Tree


class StepRecord(NamedTuple):
    """One step of all environments."""

    timestep: TimeStep  # [N, ...], before the step
    action: Tree  # [N, ...]
    extras: dict[str, Any]  # [N, ...]
    agent_state: AgentState  # [N, ...], before the step
    next_timestep: TimeStep  # [N, ...], after the step


class DeviceReplay(Protocol):
    """A replay of `Rounds`. All methods are pure functions of the replay's arrays.

    Attributes:
        steps_per_round: environment steps between two calls of `add`.
        updates_per_round: "one" if each round has exactly one update, "at most one", or "many".
        how_to_shrink: a sentence for the error of a replay that does not fit into memory.
    """

    steps_per_round: int
    updates_per_round: Literal["one", "at most one", "many"]
    how_to_shrink: str

    def init(self, record: StepRecord) -> Any:
        """Return the arrays of an empty replay. `record` has the shapes and dtypes of one step of all environments."""

    def add(self, replay: Any, records: StepRecord) -> Any:
        """Add the records [T, N, ...] of a round."""

    def is_ready(self, replay: Any) -> jax.Array:
        """Return [] bool: True if a batch can be drawn now, like `RateLimiter.may_sample`."""

    def draw(self, rng: jax.Array, replay: Any) -> tuple[Any, Batch, Any]:
        """Return (replay, batch, places). `rng` is a constant key. `set_priorities` needs the places of the items."""

    def set_priorities(self, replay: Any, places: Any, priorities: jax.Array) -> Any:
        """Set the priorities [B] of items."""
