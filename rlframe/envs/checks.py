"""Checks of pools: actions are valid and legal, numbers are finite, and no two pools step the same environment.

`mark_mask` finds the action mask in a dict observation by its key, and replaces its spec by an `ActionMaskArray`.
Agents, frame stacks and `MaskCheck` find the mask in an observation spec by this type.
"""

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
from rlframe.envs.codec import Codec, ObservationLeaf
from rlframe.envs.layout import Layout
from rlframe.errors import EnvError, UsageError
from rlframe.types import LAST, ActionMaskArray, TimeStep, Tree, category_counts, find_action_mask

_SMALL = 64  # maximum number of values for which a Python set is faster than a NumPy reduction


class ActionCheck:
    """Checks batches of actions against a spec and casts them to the spec's dtype, in about 0.3 us per batch.

    Check the shape and dtype of every batch. Check the values (range of integers, NaN and infinity) in the first batch
    and in each batch that needs a cast. If `every_value` is True, check the values in every batch. A continuous action
    may lie outside its bounds, because `Codec.decode` clips it.

    Allowed casts: bool to any number, integer to float, any float to any float, signed integer to signed integer, and
    unsigned integer to any integer. A float is never cast to an integer.

    Args:
      spec: a `dm_env.specs.Array` for the action of ONE environment.
      every_value: whether to check the values of every batch.
    """

    def __init__(self, spec: Any, every_value: bool):
        self._spec, self._dtype = spec, spec.dtype
        self._expected_shape = (0, *spec.shape)  # shape of the latest batch
        self._every_value, self._checks_values = every_value, True
        few = isinstance(spec, specs.DiscreteArray) and spec.num_values <= _SMALL
        self._allowed = frozenset(range(spec.num_values)) if few else None

    def __call__(self, actions: Any, num_envs: int) -> np.ndarray:
        """Return `actions` as [num_envs, ...] in the spec's dtype. Raise UsageError if they do not fit."""
        if type(actions) is not np.ndarray:
            actions = self._as_array(actions, num_envs)
        if num_envs != self._expected_shape[0]:
            self._expected_shape = (num_envs, *self._spec.shape)
        if actions.dtype == self._dtype and actions.shape == self._expected_shape:
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
        if actions.shape != self._expected_shape or not np.can_cast(actions.dtype, self._dtype, "same_kind"):
            hint = " Floats are not cast to integers." if is_integer and actions.dtype.kind == "f" else ""
            raise UsageError(
                f"'action' must be {self._dtype} of shape {self._expected_shape}, got {actions.dtype} of shape "
                f"{actions.shape}.{hint}"
            )
        if is_integer:
            self._check_values(actions)  # check before the cast, because the cast can overflow
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
            # If the sum of squares is finite, all values are finite. If not, `isfinite` decides, because the sum can
            # overflow. The sum takes a third of the time of `isfinite`.
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
    """Checks that the rewards, discounts and floating-point observations of timesteps are finite.

    A check takes 2 us, or 1 us if the observations contain no floating-point array.

    Args:
      observation_spec: a tree of `dm_env.specs`.
    """

    def __init__(self, observation_spec: Any):
        self._layout = Layout(observation_spec)
        self._floats = [i for i, leaf in enumerate(self._layout.leaves) if leaf.dtype.kind == "f"]

    def __call__(self, timestep: TimeStep, env_ids: np.ndarray | None = None) -> TimeStep:
        """Return the timestep [B, ...]. Raise EnvError with the id of an environment whose numbers are not finite.

        Args:
          timestep: the timestep.
          env_ids: [B] ids of the environments; None means the row numbers.
        """
        _, reward, discount, observation = timestep
        # If a dot product is finite, all its values are finite. If not, `isfinite` decides, because the dot product can
        # overflow. A dot product takes a third of the time of `isfinite`.
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
        "environment, or turn this check off with check_finite=False."
    )


def check_distinct(envs: Iterable[Any], first_id: int) -> None:
    """Raise UsageError if two of the environments are the same object, or wrap the same object.

    Args:
      envs: environments of one pool.
      first_id: the id of the first environment in the pool.
    """
    places: dict[int, int] = {}
    for i, env in enumerate(envs, first_id):
        for layer in wrapper_chain(env):
            first = places.setdefault(id(layer), i)
            if first != i:
                raise UsageError(
                    f"Environments {first} and {i} are the same object ({type(layer).__name__}): the builder must "
                    "return a new environment at each call, like `lambda: MyEnv()`."
                )


class EnvOwnership:
    """Detects that two pools step the same environment. The owner is the pool that reset the environment last.

    Two pools may use the same environment one after the other. After a reset by the second pool, the next step of the
    first pool raises.
    """

    def __init__(self) -> None:
        self.lost: str | None = None  # class name of an environment that another pool now owns

    def take(self, env: Any) -> None:
        """Record this pool as the owner of an environment and its inner environments. Call this after a reset."""
        for layer in wrapper_chain(env):
            key = id(layer)
            reference, owner = _owners.get(key, (_nothing, _nothing))
            other = owner() if reference() is layer else None
            if other is self:
                continue
            if other is not None:
                other.lost = type(layer).__name__
            with contextlib.suppress(TypeError):  # do not check classes without weak references
                _owners[key] = weakref.ref(layer, functools.partial(_forget, key)), weakref.ref(self)

    def check(self) -> None:
        """Raise UsageError if another pool has reset an environment of this pool."""
        if self.lost is not None:
            raise UsageError(
                f"Two pools step the same environment ({self.lost}) at the same time: the builder must return a new "
                "environment at each call, like `lambda: MyEnv()`."
            )


def _nothing() -> None:
    """Act as a weak reference to a deleted object."""


def _forget(key: int, reference: Any) -> None:
    if _owners.get(key, (None,))[0] is reference:
        del _owners[key]


# The `id` of an environment -> weak references to the environment and to its owner. The reference to the environment is
# necessary because a new object can have the `id` of a deleted environment.
_owners: dict[int, tuple[Any, Any]] = {}


DEFAULT_KEY = "action_mask"  # as in PettingZoo


def mark_mask(codec: Codec, key: str | None, action_repeat: int = 1) -> Codec:
    """Return the codec of an environment, with an `ActionMaskArray` as the spec of its action mask.

    Args:
        codec: codec of one environment.
        key: key of the mask in a dict observation. The default key may be absent. None means that there is no mask.
        action_repeat: number of steps for each action.

    Raises:
        UsageError: the observation has no such key, the array cannot be a mask of the actions, or actions are repeated.
    """
    observation = codec.observation_spec
    keys = list(observation) if isinstance(observation, dict) else []
    if key is None or (key == DEFAULT_KEY and key not in keys):
        return codec
    found = f"a dict with the keys {', '.join(map(str, keys))}" if keys else "no dict"
    if key not in keys:
        raise UsageError(f"action_mask={key!r} must be a key of the observation, but the observation is {found}.")
    mask, counts = observation[key], category_counts(codec.action_spec)
    off = "If this array is no mask, set action_mask (--action-mask) to None."
    if counts is None:
        raise UsageError(
            f"The observation has an action mask, {key!r}, but only Discrete actions and MultiDiscrete actions of one "
            f"axis can have a mask; got {codec.action_spec!r}. {off}"
        )
    shape, is_number = (sum(counts),), isinstance(mask, specs.Array) and type(mask) in _MASK_SPECS
    if not is_number or mask.shape != shape or not _is_binary(mask):
        raise UsageError(
            f"The action mask {key!r} must be a bool array of shape {shape}, or integers from 0 to 1, such as "
            f"MultiBinary({shape[0]}) or Box(0, 1, {shape}, np.int8); got {mask!r}. {off}"
        )
    if len(keys) == 1:
        raise UsageError(
            f"The observation has only the action mask {key!r}: the network needs another array. Add one to the dict."
        )
    if action_repeat > 1:
        raise UsageError(
            f"action_repeat={action_repeat} repeats an action that may be illegal in the next step, according to the "
            f"action mask {key!r}. Set action_repeat to 1. {off}"
        )
    tree = codec.layout.unflatten(codec.leaves)
    return Codec({**tree, key: ObservationLeaf(ActionMaskArray(counts, mask.dtype, mask.name))}, codec.action)


_MASK_SPECS = (specs.Array, specs.BoundedArray, ActionMaskArray)  # types of specs; a Discrete number is no mask


def _is_binary(spec: Any) -> bool:
    if spec.dtype.kind not in "iu":
        return spec.dtype.kind == "b"
    return isinstance(spec, specs.BoundedArray) and bool(np.all(spec.minimum == 0) and np.all(spec.maximum == 1))


class MaskCheck:
    """Checks that every environment has a legal action. A terminated episode needs none in its last observation.

    Args:
        observation_spec: a tree of `dm_env.specs`.
    """

    def __init__(self, observation_spec: Tree) -> None:
        self._key, self._spec = find_action_mask(observation_spec)

    def __call__(self, timestep: TimeStep, env_ids: Any = None) -> None:
        """Raise EnvError with the id of the first environment of a timestep [B, ...] without a legal action.

        `env_ids` [B] are the ids of the environments. None means the row numbers.
        """
        if self._spec is not None and (row := int(self.first_wrong(timestep))) >= 0:
            raise no_legal_action_error(row if env_ids is None else env_ids[row])

    def first_wrong(self, timestep: TimeStep, xp: Any = np) -> Any:
        """Return [] int: the first row of a timestep [B, ...] without a legal action, or -1.

        `xp` is the library of the arrays, `numpy` or `jax.numpy`.
        """
        wrong = self.find(timestep, xp)
        return xp.where(wrong.any(), wrong.argmax(), -1)

    def find(self, timestep: TimeStep, xp: Any = np) -> Any:
        """Return [B] bool: True in the rows of a timestep without a legal action. See `first_wrong`."""
        if self._spec is None:
            return xp.zeros(timestep.step_type.shape, bool)
        wrong = ~self._spec.has_choice(timestep.observation[self._key], xp)
        return wrong & ((timestep.step_type != LAST) | (timestep.discount > 0.0))


def no_legal_action_error(env_id: int) -> EnvError:
    """Return the error for an environment whose action mask allows no action."""
    return EnvError(
        f"Environment {env_id} gave an action mask without a legal action: expected at least one action (for "
        "MultiDiscrete, one of each choice) unless the episode has terminated. Correct the mask, or end the episode "
        "with terminated=True."
    )
