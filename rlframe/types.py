"""The data that agents, actors, learners and replay buffers hand to each other.

Batches of environments are `dm_env.TimeStep`s whose leaves carry a leading axis `[B]`:

    step_type    [B] uint8    FIRST, MID or LAST
    reward       [B] float32  of the action before (0 at FIRST)
    discount     [B] float32  1, but 0 at a LAST that the environment terminated (1 where a limit cut it)
    observation  a tree of    [B, ...]

The step after LAST ignores the action and returns FIRST. See `docs/data.md`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, Union

import dm_env
import numpy as np
from dm_env import specs

from rlframe.errors import UsageError, check_above, check_at_least, check_fraction

Tree = Any  # a pytree of arrays
Params = Any  # a pytree of parameters
AgentState = Any  # a pytree of [B, ...]: recurrent state, or ()
Logs = dict[str, Any]  # name -> scalar

TimeStep = dm_env.TimeStep

# Plain uint8: comparing an array with the enum members of dm_env is an order of magnitude slower.
FIRST = np.uint8(dm_env.StepType.FIRST)
MID = np.uint8(dm_env.StepType.MID)
LAST = np.uint8(dm_env.StepType.LAST)


class MultiDiscreteArray(specs.BoundedArray):
    """The spec of whole numbers each of which is a category: `[...]` from 0 to its number of values, less one.

    `specs.DiscreteArray` is that of a single one.

    Args:
        num_values: `[...]`, how many categories each number has.
        dtype: an integer dtype.
        name: of the array.
    """

    __slots__ = ("_num_values",)

    def __init__(self, num_values: Any, dtype: Any = np.int32, name: str | None = None) -> None:
        self._num_values = np.array(num_values, np.int64)
        super().__init__(self._num_values.shape, dtype, 0, self._num_values - 1, name)

    @property
    def num_values(self) -> np.ndarray:
        """`[...]`, how many categories each number has."""
        return self._num_values

    def __repr__(self) -> str:
        return f"MultiDiscreteArray(num_values={self._num_values.tolist()}, dtype={self.dtype}, name={self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return MultiDiscreteArray, (self._num_values, self.dtype, self.name)


class AgentOutput(NamedTuple):
    """An agent's answer to a batch of timesteps."""

    action: Tree  # [B, ...], as the action spec says
    extras: dict[str, Any] = {}  # noqa: RUF012  [B, ...] each: what the learner needs back (log-probabilities, values)
    params_version: Any = None  # int, filled in by the Inferencer: the version that acted


class Step(NamedTuple):
    """One step of a batch of environments, complete: what was seen, what was done, what followed."""

    timestep: TimeStep  # [B, ...]
    agent_output: AgentOutput  # [B, ...]
    agent_state: AgentState  # [B, ...], before the step
    params_version: int
    next_timestep: TimeStep  # [B, ...]


class TransitionBatch(NamedTuple):
    """`Transition(n_step)` items: at most n steps, fewer where the episode ends first."""

    observation: Tree  # [B, ...]
    action: Tree  # [B, ...]
    reward: Any  # [B] float32: sum over k < m of gamma^k r_{t+k+1}, with m the steps taken (<= n)
    discount: Any  # [B] float32: gamma^m times the environment's discounts; multiplies the bootstrap value
    next_observation: Tree  # [B, ...], m steps later
    extras: dict[str, Any]  # [B, ...] each, as the agent gave them at the first step


class SequenceBatch(NamedTuple):
    """`Sequence(length=T)` items: contiguous steps that may cross an episode's end.

    `step_type[:, t] == LAST` marks a step whose action the environment ignored and whose
    successor is the FIRST of the next episode: every loss masks it.
    """

    observation: Tree  # [B, T + 1, ...]
    step_type: Any  # [B, T + 1] uint8
    action: Tree  # [B, T, ...]
    reward: Any  # [B, T] float32, of action t (received with timestep t + 1)
    discount: Any  # [B, T] float32, of timestep t + 1
    extras: dict[str, Any]  # [B, T, ...] each
    agent_state: AgentState  # [B, ...], before step 0


class TokenBatch(NamedTuple):
    """S sequences of a language model, padded to T tokens.

    All that is `[S, T]` is 0 where mask is, but `tokens`, which are 0 after the end.
    """

    tokens: Any  # [S, T] int32
    mask: Any  # [S, T] float32: 1 where the token is trained on, 0 where it is not, or after the end
    advantages: Any  # [S, T] float32: as sent, or else the sequence's score at each token
    has_advantages: Any  # [S] bool: whether they are as sent, or set to 0 by an override
    scores: Any  # [S] float32
    temperature: Any  # [S] float32, above 0: of the sampling, as the environment sent it; None: 1 for all
    inference_logprobs: Any  # [S, T] float32, of the tokens; None unless all groups of the batch have them
    ref_logprobs: Any  # the same
    lengths: Any  # [S] int32: tokens before the padding
    group: Any  # [S] int32: which of the batch's groups each sequence is of, from 0 on


class Batch(NamedTuple):
    """A batch of items, as `ReplayBuffer.sample()` returns it."""

    data: Any  # a TransitionBatch, a SequenceBatch or a TokenBatch
    keys: Any  # [B, 3] int64: (rank of the writer, its incarnation, start) of each item, see `Draw`
    probabilities: Any  # [B] float32: the chance with which each item was drawn (1 / size if uniform or queue)
    params_version: Any  # [B] int64: the oldest version that acted in the item; -1 where it is unknown


class StepSpec(NamedTuple):
    """`dm_env.specs.Array` leaves, without the batch axis: what one environment's step holds."""

    observation: Tree
    action: Tree
    extras: dict[str, Any]
    agent_state: AgentState


@dataclasses.dataclass(frozen=True)
class Transition:
    """Items of up to `n_step` steps that never cross an episode's end."""

    n_step: int = 1
    discount: float = 0.99  # gamma, used to sum the n rewards

    def __post_init__(self) -> None:
        check_at_least(self, 1, "n_step")
        check_fraction(self, "discount")


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Items of `length` contiguous steps; a new one starts every `period` steps of an environment."""

    length: int
    period: int = 0  # 0: the length, so that items do not overlap

    def __post_init__(self) -> None:
        check_at_least(self, 1, "length")
        check_at_least(self, 0, "period")
        if self.period == 0:
            object.__setattr__(self, "period", self.length)


@dataclasses.dataclass(frozen=True)
class ReplaySpec:
    """The items that an agent learns from. Every buffer is built from this and the agent's `StepSpec`."""

    kind: Literal["uniform", "prioritized", "queue"]
    item: Union[Transition, Sequence]
    batch_size: Union[int, None]  # items; None: one of each environment (on-policy agents)
    capacity: int  # environment steps kept, over all environments
    min_size: int = 1  # items that must have been added before `sample` answers; in a queue, that must be there
    samples_per_insert: Union[float, None] = None  # items sampled per item added; None: as fast as they come
    priority_exponent: float = 0.6  # `prioritized` only; Schaul et al. 2016, alpha
    # Of a queue of sequences that do not overlap: by how many versions what is learned from may be behind the newest
    # parameters (0: on-policy). Actors wait for these after each unroll. None: any, and nobody waits.
    max_staleness: Union[int, None] = None
    # Seconds after which a batch of one item per environment is made without a writer that stands still. An Actor
    # waits three times as long for the next version.
    lapse_after: float = 10.0

    def __post_init__(self) -> None:
        kinds = ("uniform", "prioritized", "queue")
        if self.kind not in kinds:
            raise UsageError(f"ReplaySpec.kind must be one of {kinds}, got {self.kind!r}.")
        check_at_least(self, 1, "batch_size", "capacity", "min_size")
        check_above(self, 0, "lapse_after")
        check_at_least(self, 0, "max_staleness")
        holds_unrolls = isinstance(self.item, Sequence) and self.item.period == self.item.length
        if self.max_staleness is not None and not (self.kind == "queue" and holds_unrolls):
            raise UsageError(
                f"ReplaySpec.max_staleness={self.max_staleness} needs kind='queue' and a Sequence whose period is its "
                f"length, got a {self.kind} of {self.item}. Leave it None for an off-policy agent."
            )


class AgentSpecs(NamedTuple):
    """The two specs of an agent that a replay buffer needs."""

    replay_spec: ReplaySpec
    step_spec: StepSpec


ENVS_PER_RANK = 1_000_000


def global_env_ids(rank: int, indices: np.ndarray) -> np.ndarray:
    """[B] int64: the ids of the environments `indices` of the actor `rank`, unique over all actors."""
    return rank * ENVS_PER_RANK + np.asarray(indices, np.int64)


def split_env_ids(env_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the inverse of `global_env_ids`: (ranks [B], indices [B])."""
    return np.divmod(env_ids, ENVS_PER_RANK)


__all__ = [
    "ENVS_PER_RANK",
    "FIRST",
    "LAST",
    "MID",
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
    "global_env_ids",
    "specs",
    "split_env_ids",
]
