"""The error for an observation that is not in its space."""

from __future__ import annotations

from typing import Any

from rlframe.errors import EnvError, RlframeError, UsageError


class MisfitError(UsageError):
    """An observation, or a part of one, that is not in its space.

    Args:
      name: of the part.
      came: the value; or its dtype and shape, or its structure, where these are wrong.
      expected: what the space allows.
      place: the indices of a value that is not allowed; None where dtype, shape or structure are wrong.
    """

    def __init__(self, name: str, came: str, expected: str, place: tuple[int, ...] | None = None):
        self.name, self.came, self.expected, self.place = name, came, expected, place
        super().__init__(f"{name!r} must be {expected}, got {came}{_at(place)}.")

    def of_environment(self, env_id: int) -> RlframeError:
        """The same, naming the environment that gave the observation."""
        gave = f"Environment {env_id} gave {self.name!r}"
        if self.place is None:
            return UsageError(
                f"{gave} as {self.came}, but its space says {self.expected}. Correct the environment's observation "
                "space."
            )
        return EnvError(
            f"{gave} with {self.came}{_at(self.place)}: expected {self.expected}. Correct the environment, or its "
            "observation space."
        )

    def of_row(self, env_ids: Any) -> RlframeError:
        """The same, where the observations of the environments `env_ids` were encoded as one batch."""
        if not self.place:
            return self.of_environment(env_ids[0])
        inside = MisfitError(self.name, self.came, self.expected, self.place[1:])
        return inside.of_environment(env_ids[self.place[0]])


def _at(place: tuple[int, ...] | None) -> str:
    return f" at {place}" if place else ""
