"""Find environments that are used twice: a builder must make a new one at each call."""

from __future__ import annotations

import contextlib
import functools
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
        """Take an environment that was reset. Its wrappers may have made a new inner one in that reset."""
        for layer in layers(env):
            key = id(layer)
            reference, claim = _claims.get(key, (_nothing, _nothing))
            other = claim() if reference() is layer else None
            if other is self:
                continue
            if other is not None:
                other.taken = type(layer).__name__
            with contextlib.suppress(TypeError):  # a class without weak references: nothing is known about it
                _claims[key] = weakref.ref(layer, functools.partial(_forget, key)), weakref.ref(self)

    def check(self) -> None:
        """Raise UsageError if another pool has reset one of these environments."""
        if self.taken is not None:
            raise UsageError(
                f"Two pools step the same environment ({self.taken}) at the same time: the builder must make a new "
                "environment at each call, as `lambda: MyEnv()` does."
            )


def _nothing() -> None:
    """Stands for a reference to an object that is gone."""


def _forget(key: int, reference: Any) -> None:
    if _claims.get(key, (None,))[0] is reference:
        del _claims[key]


# By id of each environment: weak references to it and to its claim. An object that is made later may have the same id.
_claims: dict[int, tuple[Any, Any]] = {}
