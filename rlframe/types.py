"""Data types that agents, actors, learners and replay buffers exchange.

Steps of B environments are one `dm_env.TimeStep` whose arrays have a leading batch axis `[B]`:

    step_type    [B] uint8    FIRST, MID or LAST
    reward       [B] float32  reward of the previous action (0 at FIRST)
    discount     [B] float32  0 at a LAST that terminates the episode; otherwise 1, also at a LAST that truncates it
    observation  a tree of arrays [B, ...]

The step after LAST ignores the action and returns FIRST. See `docs/understand/items.md`.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any, Literal, NamedTuple, Union

import dm_env
import numpy as np
from dm_env import specs

from rlframe.errors import UsageError, check_above, check_at_least, check_fraction

Tree = Any  # a pytree of arrays
Params = Any  # a pytree of parameters
AgentState = Any  # recurrent state: a pytree of arrays [B, ...]; () for agents without a state
Logs = dict[str, Any]  # name -> scalar

TimeStep = dm_env.TimeStep

# uint8 instead of dm_env's enum members, because array comparisons with enum members are ten times slower.
FIRST = np.uint8(dm_env.StepType.FIRST)
MID = np.uint8(dm_env.StepType.MID)
LAST = np.uint8(dm_env.StepType.LAST)


class MultiDiscreteArray(specs.BoundedArray):
    """The spec of an array of categories: element i is an integer from 0 to `num_values[i] - 1`.

    For a single category, use `specs.DiscreteArray`.

    Args:
        num_values: `[...]`, number of categories of each element.
        dtype: an integer dtype.
        name: name of the array.
    """

    __slots__ = ("_num_values",)

    def __init__(self, num_values: Any, dtype: Any = np.int32, name: str | None = None) -> None:
        self._num_values = np.array(num_values, np.int64)
        super().__init__(self._num_values.shape, dtype, 0, self._num_values - 1, name)

    @property
    def num_values(self) -> np.ndarray:
        """Number of categories of each element, `[...]`."""
        return self._num_values

    def __repr__(self) -> str:
        return f"MultiDiscreteArray(num_values={self._num_values.tolist()}, dtype={self.dtype}, name={self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return MultiDiscreteArray, (self._num_values, self.dtype, self.name)


class ActionMaskArray(specs.BoundedArray):
    """The spec of an action mask `[n]`: an element is 0 if its action is illegal.

    For a Discrete action, n is the number of actions. For a MultiDiscrete action, n is the sum of `num_values`, and the
    mask consists of one part for each choice, as in sb3-contrib.

    Args:
        num_values: number of actions, or a sequence with the number of categories of each choice.
        dtype: bool or an integer dtype.
        name: name of the array.
    """

    __slots__ = ("_num_values",)

    def __init__(self, num_values: Any, dtype: Any = np.bool_, name: str | None = None) -> None:
        self._num_values = np.atleast_1d(np.array(num_values, np.int64))
        super().__init__((int(self._num_values.sum()),), dtype, 0, 1, name)

    def has_choice(self, mask: Any, xp: Any = np) -> Any:
        """Return `[...]` bool: True where each part of a mask `[..., n]` has a legal action.

        `xp` is the library of the arrays, `numpy` or `jax.numpy`.
        """
        parts = xp.split(mask != 0, np.cumsum(self._num_values)[:-1], axis=-1)
        return functools.reduce(operator.and_, (part.any(axis=-1) for part in parts))

    def __repr__(self) -> str:
        return f"ActionMaskArray(num_values={self._num_values.tolist()}, dtype={self.dtype}, name={self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ActionMaskArray, (self._num_values, self.dtype, self.name)


class AgentOutput(NamedTuple):
    """An agent's output for a batch of timesteps."""

    action: Tree  # [B, ...], matches the action spec
    extras: dict[str, Any] = {}  # noqa: RUF012  arrays [B, ...] for the learner, such as log-probabilities and values
    params_version: Any = None  # int, version of the parameters that chose the action; set by the Inferencer


class Step(NamedTuple):
    """One step of a batch of environments: the timestep, the agent's output and the next timestep."""

    timestep: TimeStep  # [B, ...]
    agent_output: AgentOutput  # [B, ...]
    agent_state: AgentState  # [B, ...], state before the step
    params_version: Any  # int or [B] int64: version of the parameters that chose the actions
    next_timestep: TimeStep  # [B, ...]


class TransitionBatch(NamedTuple):
    """A batch of `Transition(n_step)` items. An item has fewer than n steps if the episode ends earlier."""

    observation: Tree  # [B, ...]
    action: Tree  # [B, ...]
    reward: Any  # [B] float32: n-step reward, the sum of gamma^k r_{t+k+1} over k < m, for an item of m <= n steps
    discount: Any  # [B] float32: factor of the bootstrap value, gamma^m times the product of the m discounts
    next_observation: Tree  # [B, ...], observation m steps later
    extras: dict[str, Any]  # arrays [B, ...], the agent's extras at the first step


class SequenceBatch(NamedTuple):
    """A batch of `Sequence(length=T)` items: contiguous steps that may cross the end of an episode.

    At a step with `step_type[:, t] == LAST`, the environment ignored the action, and the next step is the FIRST of
    the next episode. Losses must mask this step.
    """

    observation: Tree  # [B, T + 1, ...]
    step_type: Any  # [B, T + 1] uint8
    action: Tree  # [B, T, ...]
    reward: Any  # [B, T] float32, reward of action t (received with timestep t + 1)
    discount: Any  # [B, T] float32, discount of timestep t + 1
    extras: dict[str, Any]  # arrays [B, T, ...]
    agent_state: AgentState  # [B, ...], state of the agent before step 0


class TokenBatch(NamedTuple):
    """A batch of S token sequences for a language model, padded to T tokens.

    Arrays `[S, T]` are 0 where `mask` is 0, except `tokens`, which is 0 only in the padding.
    """

    tokens: Any  # [S, T] int32
    mask: Any  # [S, T] float32: 1 for tokens that are trained on; 0 for other tokens and padding
    advantages: Any  # [S, T] float32: the received advantages; if none were sent, the sequence's score at each token
    has_advantages: Any  # [S] bool: True if the environment sent advantages, or if an override set them to 0
    scores: Any  # [S] float32
    temperature: Any  # [S] float32, above 0: sampling temperature that the environment sent; None means 1 for all
    inference_logprobs: Any  # [S, T] float32: log-probabilities of the tokens; None unless all groups have them
    ref_logprobs: Any  # [S, T] float32: log-probabilities of the reference model; None unless all groups have them
    lengths: Any  # [S] int32: number of tokens before the padding
    group: Any  # [S] int32: index of the sequence's group in the batch


class Batch(NamedTuple):
    """A batch of items from `ReplayBuffer.sample()`."""

    data: Any  # TransitionBatch, SequenceBatch or TokenBatch
    keys: Any  # [B, 3] int64: (writer's rank, writer's incarnation, start of the item); see `Draw`
    probabilities: Any  # [B] float32: sampling probability of each item (1 / size for uniform and queue)
    params_version: Any  # [B] int64: oldest parameters version that chose an action in the item; -1 if unknown


class StepSpec(NamedTuple):
    """The specs of one environment's step: trees of `dm_env.specs.Array`, without the batch axis."""

    observation: Tree
    action: Tree
    extras: dict[str, Any]
    agent_state: AgentState


@dataclasses.dataclass(frozen=True)
class Transition:
    """Items of up to `n_step` steps that never cross the end of an episode."""

    n_step: int = 1
    discount: float = 0.99  # gamma in the sum of the n rewards

    def __post_init__(self) -> None:
        check_at_least(self, 1, "n_step")
        check_fraction(self, "discount")


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Items of `length` contiguous steps. A new item starts every `period` steps of an environment."""

    length: int
    period: int = 0  # 0 means equal to `length`, so items do not overlap

    def __post_init__(self) -> None:
        check_at_least(self, 1, "length")
        check_at_least(self, 0, "period")
        if self.period == 0:
            object.__setattr__(self, "period", self.length)


@dataclasses.dataclass(frozen=True)
class ReplaySpec:
    """A description of the items that an agent learns from. With the agent's `StepSpec`, it defines a replay buffer."""

    kind: Literal["uniform", "prioritized", "queue"]
    item: Union[Transition, Sequence]
    batch_size: Union[int, None]  # number of items; None means one item per environment (on-policy agents)
    capacity: int  # maximum number of environment steps in the buffer, over all environments
    min_size: int = 1  # `sample` waits for this number of added items; for a queue, of items that it contains now
    samples_per_insert: Union[float, None] = None  # rate limit: items sampled per item added; None means no limit
    priority_exponent: float = 0.6  # only for `prioritized`: alpha in Schaul et al. 2016
    # Maximum difference in versions between the newest parameters and the sampled data (0 means on-policy). Actors wait
    # for new parameters after each unroll. None means no limit and no waiting. Requires a queue of sequences that do
    # not overlap.
    max_staleness: Union[int, None] = None
    # After this number of seconds without data from a writer, batches with one item per environment omit the writer's
    # environments. An Actor waits up to three times this value for the next version.
    lapse_after: float = 10.0

    def __post_init__(self) -> None:
        kinds = ("uniform", "prioritized", "queue")
        if self.kind not in kinds:
            raise UsageError(f"ReplaySpec.kind must be one of {kinds}, got {self.kind!r}.")
        check_at_least(self, 1, "batch_size", "capacity", "min_size")
        check_above(self, 0, "samples_per_insert", "lapse_after")
        check_at_least(self, 0, "max_staleness")
        holds_unrolls = isinstance(self.item, Sequence) and self.item.period == self.item.length
        if self.max_staleness is not None and not (self.kind == "queue" and holds_unrolls):
            raise UsageError(
                f"ReplaySpec.max_staleness={self.max_staleness} needs kind='queue' and a Sequence whose period equals "
                f"its length, got a {self.kind} of {self.item}. Use None for an off-policy agent."
            )


class AgentSpecs(NamedTuple):
    """The specs of an agent that a replay buffer needs."""

    replay_spec: ReplaySpec
    step_spec: StepSpec


ENVS_PER_RANK = 1_000_000


def find_action_mask(observation_spec: Tree) -> tuple[Any, ActionMaskArray | None]:
    """Return the (key, spec) of the action mask in a dict observation, or (None, None) if there is no mask."""
    leaves = observation_spec.items() if isinstance(observation_spec, dict) else ()
    return next(((key, leaf) for key, leaf in leaves if isinstance(leaf, ActionMaskArray)), (None, None))


def category_counts(action_spec: Any) -> tuple[int, ...] | None:
    """Return the number of categories of each choice of an action: one number for Discrete, several for MultiDiscrete.

    Return None for other actions, and for a MultiDiscrete with several axes.
    """
    if isinstance(action_spec, specs.DiscreteArray):
        return (action_spec.num_values,)
    is_vector = isinstance(action_spec, specs.BoundedArray) and len(action_spec.shape) == 1
    if not is_vector or not np.issubdtype(action_spec.dtype, np.integer) or np.any(np.asarray(action_spec.minimum)):
        return None
    largest = np.asarray(action_spec.maximum, np.int64)  # convert to int first: in uint8, 255 + 1 is 0
    return tuple(int(n) for n in np.broadcast_to(largest + 1, action_spec.shape))


def has_channels_first(shape: tuple[int, ...]) -> bool:
    """Return True if an image shape is [C, H, W], and False if it is [H, W, C].

    The axis that differs from two equal axes is C. If all axes differ, the smaller of the first and the last axis is C.
    If all axes are equal, the last one is C.
    """
    first, middle, last = shape
    if middle in (first, last):
        return first != middle
    return first <= last


def global_env_ids(rank: int, indices: np.ndarray) -> np.ndarray:
    """Return ids [B] int64 for the environments `indices` of the actor `rank`. No other actor has the same ids."""
    return rank * ENVS_PER_RANK + np.asarray(indices, np.int64)


def split_env_ids(env_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the (ranks [B], indices [B]) of ids from `global_env_ids`."""
    return np.divmod(env_ids, ENVS_PER_RANK)


def call_number(rank: int, calls: int) -> np.uint32:
    """Return the number that determines the random numbers of a call, for the `calls`-th call of an actor.

    Inferencers with the same seed would draw the same numbers for all actors. So each rank starts its random numbers at
    another position of the stream. Strides of the golden ratio keep these positions apart for any number of ranks.
    """
    return np.uint32((calls + rank * 0x9E3779B1) & 0xFFFFFFFF)


__all__ = [
    "ENVS_PER_RANK",
    "FIRST",
    "LAST",
    "MID",
    "ActionMaskArray",
    "AgentOutput",
    "AgentSpecs",
    "AgentState",
    "Batch",
    "Logs",
    "MultiDiscreteArray",
    "Params",
    "ReplaySpec",
    "Sequence",
    "SequenceBatch",
    "Step",
    "StepSpec",
    "TimeStep",
    "TokenBatch",
    "Transition",
    "TransitionBatch",
    "Tree",
    "category_counts",
    "find_action_mask",
    "global_env_ids",
    "has_channels_first",
    "specs",
    "split_env_ids",
]
