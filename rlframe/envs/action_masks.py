"""Action masks: an array in a dict observation that marks the legal actions.

`mark_mask` finds the array by its key, and replaces its spec by an `ActionMaskArray`. Agents, frame stacks and the
checks here find the mask in an observation spec by this type.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from dm_env import specs

from rlframe.envs.codec import Codec, ObservationLeaf
from rlframe.errors import EnvError, UsageError
from rlframe.types import LAST, ActionMaskArray, TimeStep, Tree, category_counts, find_action_mask

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
