"""Apply the overrides of a task: replace a few named values of an agent or a config."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from rlframe.coordinator.param_store import StoredParams
from rlframe.errors import UsageError, suggest
from rlframe.types import AgentOutput, AgentState, TimeStep, Tree


def with_config(agent: Any, values: Mapping[str, Any]) -> Any:
    """Return an agent with the given values in its config.

    Raises:
        UsageError: The config has no such field or rejects the value, or the new agent would not fit the existing
            replay buffer and param store.
    """
    if not values:
        return agent
    changed = agent.with_inner(lambda inner: _with_replaced_config(inner, values))
    for what, property_of in _FIXED_PROPERTIES.items():
        if property_of(changed) != property_of(agent):
            raise UsageError(
                f"The policy overrides {values!r} change the {what} of {agent.type_name}, which must stay the same for "
                "the run's replay buffer and param store. Leave them out, or start a new run."
            )
    return changed


def policy_overrides(found: StoredParams | None) -> dict[str, Any]:
    """Return the policy overrides that the learner put into the param store with the parameters."""
    return ((found.hparams if found is not None else None) or {}).get("policy", {})


def _with_replaced_config(agent: Any, values: Mapping[str, Any]) -> Any:
    if not dataclasses.is_dataclass(agent.cfg):
        raise UsageError(f"{agent.type_name} has no config, so it has no policy overrides: got {values!r}.")
    known = [field.name for field in dataclasses.fields(agent.cfg)]
    return agent.with_config(replaced(agent.cfg, "policy", values, known))


_FIXED_PROPERTIES = {
    "replay_spec": lambda agent: agent.replay_spec,
    "step_spec": lambda agent: agent.step_spec,
    "parameters": lambda agent: jax.eval_shape(lambda: _acting_params(agent)),
}


def replaced(cfg: Any, section: str, values: Mapping[str, Any], known: Iterable[str]) -> Any:
    """Return a config with the given values. `known` lists the fields that may be replaced.

    Raises:
        UsageError: The field does not exist or is not in `known`, or the config rejects the value.
    """
    _check_known(section, values, known, type(cfg).__name__)
    try:
        return dataclasses.replace(cfg, **values)
    except TypeError as error:
        raise UsageError(f"{type(cfg).__name__} rejects the {section} overrides {values!r}: {error}.") from None


class FixedParamsAgent:
    """An agent with constants in place of some numbers from its `actor_params`, such as `epsilon`.

    Args:
        agent: The original `Agent`.
        values: The constants, by field of the tuple, or key of the dict, that `actor_params` returns.

    Raises:
        UsageError: There is no such number, or a value is not a number.
    """

    def __init__(self, agent: Any, values: Mapping[str, Any]) -> None:
        self._agent, self._values = agent, dict(values)
        params = _fields(jax.eval_shape(lambda: _acting_params(agent)))
        numbers = {name: leaf for name, leaf in params.items() if getattr(leaf, "shape", None) == ()}
        _check_known("collector", values, numbers, f"the actor parameters of {agent.type_name}")
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise UsageError(f"The collector override {name} must be a number, got {value!r}.")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy has no `_agent` yet
            raise AttributeError(name)
        return getattr(self._agent, name)

    def actor_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        """See `Agent`."""
        fields = _fields(params)
        fixed = {name: jnp.asarray(value, fields[name].dtype) for name, value in self._values.items()}
        params = {**params, **fixed} if isinstance(params, dict) else params._replace(**fixed)
        return self._agent.actor_step(rng, params, timestep, state)


def check_accepts_env_kwargs(make_actor: Any, values: Mapping[str, Any]) -> None:
    """Raise `UsageError` if the function that makes a collector's Actor does not accept `env_kwargs`."""
    accepted = inspect.signature(make_actor).parameters.values()
    if not any(each.name == "env_kwargs" or each.kind is each.VAR_KEYWORD for each in accepted):
        raise UsageError(
            f"The env overrides {dict(values)!r} cannot be applied: the collector's make_actor takes no env_kwargs. "
            "Define make_actor(inferencer, rank, env_kwargs={}), and pass env_kwargs to the environment."
        )


def _acting_params(agent: Any) -> Tree:
    params = agent.initial_params(jax.random.PRNGKey(0))
    return agent.actor_params(params, agent.initial_learner_state(params))


def _fields(params: Tree) -> Mapping[str, Any]:
    if isinstance(params, dict):
        return params
    return params._asdict() if hasattr(params, "_asdict") else {}


def _check_known(section: str, values: Mapping[str, Any], known: Iterable[str], whose: str) -> None:
    known = list(known)
    for name in values:
        if name not in known:
            allowed = f"can be overridden: {', '.join(known)}" if known else "nothing can be overridden"
            raise UsageError(f"{name!r} cannot be overridden ({section}). In {whose}, {allowed}.{suggest(name, known)}")
