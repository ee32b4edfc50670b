"""Find environments that are used twice: a builder must make a new one at each call."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from rlframe.envs.answers import layers
from rlframe.errors import UsageError


def check_distinct(envs: Iterable[Any], first_id: int) -> None:
    """Raise UsageError if two of the environments `first_id ..` of a pool are one object, or wrap the same one."""
    places: dict[int, int] = {}
    for i, env in enumerate(envs, first_id):
        for layer in layers(env):
            first = places.setdefault(id(layer), i)
            if first != i:
                raise UsageError(
                    f"Environments {first} and {i} are the same object ({type(layer).__name__}): the builder must make "
                    "a new environment at each call, as `lambda: MyEnv()` does."
                )


class Claim:
    """Marks the environments of one pool as in use. The pool that resets an environment last has it.

    So pools may use one object in turn, but two that step it at the same time raise.
    """

    def __init__(self) -> None:
        self.taken: str | None = None  # the class of an environment that another pool has reset since

    def take(self, env: Any) -> None:
        """Take an environment, which is about to be reset."""
        for layer in layers(env):
            other = _claims.get(id(layer))
            if other is not None and other is not self:
                other.taken = type(layer).__name__
            _claims[id(layer)] = self

    def check(self) -> None:
        """Raise UsageError if another pool has reset one of these environments."""
        if self.taken is not None:
            raise UsageError(
                f"Two pools step the same environment ({self.taken}) at the same time: the builder must make a new "
                "environment at each call, as `lambda: MyEnv()` does."
            )


# By `id` of the environment. The pool that holds the claim holds the environment too, so the id stays its own.
_claims: weakref.WeakValueDictionary[int, Claim] = weakref.WeakValueDictionary()
