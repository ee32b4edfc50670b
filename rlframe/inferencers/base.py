"""The protocol of what answers timesteps with actions, and the one adapter to it."""

from __future__ import annotations

import inspect
import math
from typing import Any, Protocol

import numpy as np

from rlframe import handles
from rlframe.errors import UsageError
from rlframe.inferencers.shared_calls import RemoteInferencer
from rlframe.types import AgentOutput, AgentState, TimeStep


class Inference(Protocol):
    """Answers timesteps with actions: an Inferencer, a handle to one, or an object of your own.

    The recurrent state travels with the call. So any of several inferencers may answer for any environment, a call may
    be repeated, and an inferencer that is restarted has lost nothing.

    Some callers need more methods: an Actor of an on-policy agent `wait_for_version`, as a `ParamSource` has it; an
    Actor whose replay is on another node `specs()`; an Evaluator `refresh()`, before it begins.
    """

    def inference(self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState) -> tuple[AgentOutput, AgentState]:
        """Return (output, next state) for `env_ids` [B] at `timestep` [B, ...] in `state` [B, ...]."""

    def initial_state(self, batch_size: int) -> AgentState:
        """Return the recurrent state at FIRST, a tree of [batch_size, ...]; `()` if there is none."""


def as_inference(target: Any) -> Any:
    """Return the target as an `Inference`: itself, or an adapter of an object without recurrent state.

    Args:
        target: whose `inference` takes (env_ids, timestep), and perhaps the state, and gives an `AgentOutput`, or
            (`AgentOutput`, state).

    Raises:
        UsageError: it has no `inference`.
    """
    if isinstance(target, handles.Remote):
        return RemoteInferencer.of(target)
    if hasattr(target, "inference") and hasattr(target, "initial_state"):
        return target
    if not callable(getattr(target, "inference", None)):
        raise UsageError(
            f"A {type(target).__name__} was given as the inferencer: it needs inference(env_ids, timestep, state) -> "
            f"(AgentOutput, state) and initial_state(batch_size), or inference(env_ids, timestep) alone."
        )
    return StatelessInference(target)


def count_positional(function: Any) -> float:
    """Return how many positional arguments a function takes; infinity if any number."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return math.inf
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


class StatelessInference:
    """An `Inference` without recurrent state, of an object that has `inference` alone.

    Args:
        target: the object, or a handle to a node that is one.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._takes_state = 2 < count_positional(target.inference) < math.inf  # a node's method takes any number

    def inference(self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState) -> tuple[AgentOutput, AgentState]:
        """See `Inference`. Its version is -1 where the object says none."""
        answer = self._target.inference(env_ids, timestep, *([state] if self._takes_state else []))
        output = answer[0] if isinstance(answer, tuple) and not isinstance(answer, AgentOutput) else answer
        if not isinstance(output, AgentOutput):
            raise UsageError(
                f"{type(self._target).__name__}.inference gave a {type(answer).__name__}; it must be an AgentOutput, "
                "or (AgentOutput, state)."
            )
        return (output if output.params_version is not None else output._replace(params_version=-1)), ()

    def initial_state(self, batch_size: int) -> AgentState:
        """See `Inference`."""
        return ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return getattr(self._target, name)
        except AttributeError:
            raise UsageError(
                f"The inferencer is a {type(self._target).__name__}, which has no {name}(), as an Inferencer has: this "
                "use of it needs that."
            ) from None
