"""Checks of environments: actions that fit, finite numbers, and no environment in two places at once."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
from dm_env import specs

from rlframe.envs.api_checks import wrapper_chain
from rlframe.envs.layout import Layout
from rlframe.errors import EnvError, UsageError
from rlframe.types import TimeStep

_SMALL = 64  # values up to which a Python set is quicker than a numpy reduction


class ActionCheck:
    """Checks batches of actions against a spec, in about 0.3 us where nothing is wrong, and casts them to its dtype.

    Shape and dtype are checked in every batch. The values (the range of integers; NaN and infinity) are checked in the
    first one and wherever a cast is needed, or in every one. A continuous action may lie outside its bounds: what it
    does then is the environment's affair.

    Casts that are allowed: bool to any number; an integer to a float; and within one kind: any float to any float,
    signed to signed, unsigned to any integer. Never a float to an integer.

    Args:
      spec: a `dm_env.specs.Array`, of ONE environment's action.
      every_value: whether to check the values in every batch.
    """

    def __init__(self, spec: Any, every_value: bool):
        self._spec, self._dtype = spec, spec.dtype
        self._wanted = (0, *spec.shape)  # the shape of the batch that came last
        self._every_value, self._checks_values = every_value, True
        few = isinstance(spec, specs.DiscreteArray) and spec.num_values <= _SMALL
        self._allowed = frozenset(range(spec.num_values)) if few else None

    def __call__(self, actions: Any, num_envs: int) -> np.ndarray:
        """`actions` as [num_envs, ...] in the spec's dtype. Raises UsageError where they do not fit."""
        if type(actions) is not np.ndarray:
            actions = self._as_array(actions, num_envs)
        if num_envs != self._wanted[0]:
            self._wanted = (num_envs, *self._spec.shape)
        if actions.dtype == self._dtype and actions.shape == self._wanted:
            if self._checks_values:
                self._check_values(actions)
                self._checks_values = self._every_value
            return actions
        return self._cast(actions)

    def _as_array(self, actions: Any, num_envs: int) -> np.ndarray:
        try:
            return np.asarray(actions)
        except ValueError as error:
            wanted = (num_envs, *self._spec.shape)
            raise UsageError(f"'action' must be {self._dtype} of shape {wanted}: {error}") from error

    def _cast(self, actions: np.ndarray) -> np.ndarray:
        is_integer = self._dtype.kind in "iu"
        if actions.shape != self._wanted or not np.can_cast(actions.dtype, self._dtype, "same_kind"):
            hint = " Floats are not cast to integers." if is_integer and actions.dtype.kind == "f" else ""
            raise UsageError(
                f"'action' must be {self._dtype} of shape {self._wanted}, got {actions.dtype} of shape "
                f"{actions.shape}.{hint}"
            )
        if is_integer:
            self._check_values(actions)  # before the cast, which may wrap them around
            return actions.astype(self._dtype)
        with np.errstate(over="ignore"):
            narrow = actions.astype(self._dtype)
        too_large = np.isfinite(actions) & ~np.isfinite(narrow)
        if too_large.any():
            self._refuse(actions, too_large, f"numbers that fit {self._dtype}")
        self._check_values(narrow)
        return narrow

    def _check_values(self, actions: np.ndarray) -> None:
        if self._allowed is not None and actions.size <= _SMALL:
            if not self._allowed.issuperset(actions.tolist()):
                self._check_range(actions)
        elif self._dtype.kind == "f":
            flat = actions.ravel()
            # The sum of squares takes a third of the time of `isfinite`; where it overflows, that decides.
            if not math.isfinite(flat.dot(flat)) and not np.isfinite(actions).all():
                self._refuse(actions, ~np.isfinite(actions), "finite")
        elif isinstance(self._spec, specs.BoundedArray):
            self._check_range(actions)

    def _check_range(self, actions: np.ndarray) -> None:
        low, high = self._spec.minimum, self._spec.maximum
        wrong = (actions < low) | (actions > high)
        if wrong.any():
            self._refuse(actions, wrong, f"between {low} and {high}")

    def _refuse(self, actions: np.ndarray, wrong: np.ndarray, expected: str) -> None:
        first = tuple(int(index[0]) for index in np.nonzero(wrong))
        raise UsageError(f"'action' must be {expected}, got {actions[first]} in row {first[0]} of the batch.")


class FiniteCheck:
    """Checks the rewards, discounts and floating-point observations of timesteps, in 2 us (1 us without the last).

    Args:
      observation_spec: a tree of `dm_env.specs`.
    """

    def __init__(self, observation_spec: Any):
        self._layout = Layout(observation_spec)
        self._floats = [i for i, leaf in enumerate(self._layout.leaves) if leaf.dtype.kind == "f"]

    def __call__(self, timestep: TimeStep, env_ids: np.ndarray | None = None) -> TimeStep:
        """The timestep [B, ...]. Raises EnvError, naming the environment (`env_ids` [B], or the row), if not finite."""
        _, reward, discount, observation = timestep
        # A product of finite numbers may overflow, and one with NaN or infinity is never finite: so a dot product finds
        # them in a third of the time of `isfinite`, which decides where it is not finite.
        if not math.isfinite(reward.dot(discount)):
            _refuse_infinite("reward", reward, env_ids)
            _refuse_infinite("discount", discount, env_ids)
        if self._floats:
            leaves = (observation,) if self._layout.is_leaf else self._layout.flatten(observation)
            for i in self._floats:
                flat = leaves[i].ravel()
                if not math.isfinite(flat.dot(flat)):
                    _refuse_infinite(self._layout.leaves[i].name, leaves[i], env_ids)
        return timestep


def _refuse_infinite(name: str, values: np.ndarray, env_ids: np.ndarray | None) -> None:
    wrong = ~np.isfinite(values)
    if not wrong.any():
        return
    place = tuple(int(index[0]) for index in np.nonzero(wrong))
    env_id = place[0] if env_ids is None else env_ids[place[0]]
    where = f" at {place[1:]}" if len(place) > 1 else ""
    raise EnvError(
        f"Environment {env_id} gave {name!r} with {values[place]}{where}: expected finite numbers. Correct the "
        "environment, or let it pass with check_finite=False."
    )


def check_distinct(envs: Iterable[Any], first_id: int) -> None:
    """Raise UsageError if two of the environments `first_id ..` of a pool are one object, or wrap the same one."""
    places: dict[int, int] = {}
    for i, env in enumerate(envs, first_id):
        for layer in wrapper_chain(env):
            first = places.setdefault(id(layer), i)
            if first != i:
                raise UsageError(
                    f"Environments {first} and {i} are the same object ({type(layer).__name__}): the builder must make "
                    "a new environment at each call, as `lambda: MyEnv()` does."
                )


class EnvOwnership:
    """Marks the environments of one pool as in use. The pool that resets an environment last has it.

    So pools may use one object in turn, but two that step it at the same time raise.
    """

    def __init__(self) -> None:
        self.taken: str | None = None  # the class of an environment that another pool has reset since

    def take(self, env: Any) -> None:
        """Take an environment that was reset. Its wrappers may have made a new inner one in that reset."""
        for layer in wrapper_chain(env):
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
