"""The protocol of an object that returns actions for timesteps, and an adapter for objects without recurrent state."""

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
    """Returns actions for timesteps: an Inferencer, a handle to an Inferencer, or your own object.

    The caller passes the recurrent state with each call. So any of several inferencers can answer for any environment,
    a call can be repeated, and no state is lost if an inferencer restarts.

    Some callers need more methods. An Actor of an on-policy agent needs `wait_for_version`, as in `ParamSource`. An
    Actor whose replay is on another node needs `specs()`. An Evaluator needs `refresh()` before it begins.
    """

    def inference(self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState) -> tuple[AgentOutput, AgentState]:
        """Return (output, next state) for a batch of environments.

        `env_ids` is [B]. The leaves of `timestep` and of the recurrent `state` are [B, ...].
        """

    def initial_state(self, batch_size: int) -> AgentState:
        """Return the recurrent state for FIRST timesteps: a tree of [batch_size, ...]; `()` for a stateless agent."""


def as_inference(target: Any) -> Any:
    """Return the target itself if it implements `Inference`, else an adapter for it.

    Args:
        target: an object whose `inference` takes (env_ids, timestep), and optionally the state. It returns an
            `AgentOutput`, or (`AgentOutput`, state).

    Raises:
        UsageError: the target has no `inference` method.
    """
    if isinstance(target, handles.Remote):
        return RemoteInferencer.of(target)
    if hasattr(target, "inference") and hasattr(target, "initial_state"):
        return target
    if not callable(getattr(target, "inference", None)):
        raise UsageError(
            f"A {type(target).__name__} cannot be an inferencer: it needs inference(env_ids, timestep, state) -> "
            f"(AgentOutput, state) and initial_state(batch_size), or inference(env_ids, timestep) alone."
        )
    return StatelessInference(target)


def count_positional(function: Any) -> float:
    """Return the number of positional arguments of a function; infinity if the function has `*args`."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return math.inf
    return sum(one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters)


class StatelessInference:
    """Adapts an object that only has `inference` to an `Inference` without recurrent state.

    Args:
        target: an object with `inference`, or a handle to a node with such an object.
    """

    def __init__(self, target: Any) -> None:
        self._target = target
        self._takes_state = 2 < count_positional(target.inference) < math.inf  # a handle's methods have `*args`

    def inference(self, env_ids: np.ndarray, timestep: TimeStep, state: AgentState) -> tuple[AgentOutput, AgentState]:
        """See `Inference`. `output.params_version` is -1 if the object returns no version."""
        answer = self._target.inference(env_ids, timestep, *([state] if self._takes_state else []))
        output = answer[0] if isinstance(answer, tuple) and not isinstance(answer, AgentOutput) else answer
        if not isinstance(output, AgentOutput):
            raise UsageError(
                f"{type(self._target).__name__}.inference returned a {type(answer).__name__}. It must be an "
                "AgentOutput, or (AgentOutput, state)."
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
                f"The inferencer is a {type(self._target).__name__} without the method {name}(). This use of it needs "
                "that method, which an Inferencer has."
            ) from None
