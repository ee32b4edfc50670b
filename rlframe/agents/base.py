"""The Agent: pure functions and a config. It holds no parameters.

A subclass says how to act and what to learn from; `loss` is enough where one gradient step per
batch is. An algorithm that needs more overrides `learner_step` or the three parts that it calls.
"""

from __future__ import annotations

import copyreg
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlframe.agents.subclass_checks import check_arguments, check_methods
from rlframe.agents.trees import check_tree, without_batch, zero_timestep, zeros_like_spec
from rlframe.errors import UsageError
from rlframe.types import AgentOutput, AgentState, Batch, Logs, Params, ReplaySpec, StepSpec, TimeStep, Tree

NetFactory = Callable[[Tree, Tree], Any]  # (observation_spec, action_spec) -> an object with init and apply
PolicyFactory = Callable[[Tree], Any]  # (action_spec) -> a distribution, see `rlframe.agents.distributions`


class LearnerState(NamedTuple):
    """What learning needs beside the parameters.

    An agent that needs more (target parameters, statistics of observations) has a NamedTuple of its own, with these
    three and more fields. The Learner sets `rng` from its seed.
    """

    opt_state: Any
    steps: Any  # [] int32: learner steps done; float32 where a smaller batch counts as a fraction of one
    rng: Any  # a key of jax.random


class TargetState(NamedTuple):
    """A `LearnerState`, with the parameters of target networks."""

    opt_state: Any
    steps: Any
    rng: Any
    target_params: Params


class Agent:
    """Base class of agents.

    Every method is a pure function of its arguments, so a caller may jit it, repeat it or run it
    elsewhere. An agent is its class and its constructor arguments: that is what is pickled.

    A subclass whose method is nearly one of these (`update_learnerstate`), or takes other arguments, is refused with a
    UsageError when it is made: nothing would call it. Begin the names of methods of your own otherwise, or with `_`.

    Args:
        cfg: an instance of `config_cls`.
        observation_spec: a tree of `dm_env.specs.Array`, of one environment.
        action_spec: the same.
        net_factory: None for the agent's default. A `NetworkConfig` of `rlframe.agents.networks`,
            or any `f(observation_spec, action_spec)` that gives an object with `init(rng, observation)`
            and `apply(params, observation)`, where observations are `[B, ...]`. The agent's class
            says what `apply` must return. A constructor of your own takes it only where it reads it: without,
            `--network` is refused.
        policy_factory: `f(action_spec)` that gives a distribution (`rlframe.agents.distributions`).
            None for the agent's default. Refused by agents whose distribution is fixed, or that have none.
    """

    config_cls: type[Any] = type(None)
    network_configs: tuple[Any, ...] = ()  # the agent's own defaults of named networks, at most one of each class
    takes_policy: bool = True  # whether a policy_factory is read; else it is refused
    learns_from: str = "steps"  # of environments, by a replay; "trajectories": `TokenBatch`es of a trajectory service
    network: Any  # has `init` and `apply`; set by subclasses that do not override `initial_params`
    _constructed_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_methods(Agent, cls)

    def __new__(cls, *args: Any, **kwargs: Any) -> Agent:
        check_arguments(cls, kwargs)
        agent = super().__new__(cls)
        agent._constructed_with = (args, kwargs)
        return agent

    def __reduce__(self) -> tuple[Any, ...]:
        # Networks and optimizers are closures, which do not pickle; their factories do.
        args, kwargs = self._constructed_with
        return functools.partial(type(self), *args, **kwargs), ()

    def __init__(
        self,
        cfg: Any,
        observation_spec: Tree,
        action_spec: Tree,
        net_factory: NetFactory | None = None,
        policy_factory: PolicyFactory | None = None,
    ) -> None:
        if self.config_cls is not type(None) and not isinstance(cfg, self.config_cls):
            raise UsageError(
                f"{type(self).__name__} needs a {self.config_cls.__name__} as its config, got {type(cfg).__name__}."
            )
        if policy_factory is not None and not self.takes_policy:
            raise UsageError(
                f"{type(self).__name__} reads no policy_factory: its actions are not drawn from a distribution that "
                "can be chosen. Leave it out; PPO and IMPALA take one."
            )
        self.cfg = cfg
        self.observation_spec = observation_spec
        self.action_spec = action_spec
        self.net_factory = net_factory
        self.policy_factory = policy_factory

    @property
    def type_name(self) -> str:
        """What messages call this agent: its class, or that of the agent inside of a transform."""
        return type(self).__name__

    def with_inner(self, change: Callable[[Agent], Agent]) -> Agent:
        """Return `change(self)`. A transform returns itself around the changed inner agent."""
        return change(self)

    # Acting

    def initial_params(self, rng: jax.Array) -> Params:
        """Fresh parameters, a pytree of float arrays: those of `self.network`, unless overridden."""
        return self.network.init(rng, zeros_like_spec(self.observation_spec, 1))

    def initial_state(self, batch_size: int) -> AgentState:
        """The recurrent state at FIRST, a pytree of `[batch_size, ...]`. `()` where there is none.

        Row k is that of the program's environment k, of Actor k // N where each has N, whatever `batch_size`: what
        differs between environments, as an exploration rate, may stand in it.

        The state travels with the Actor: `actor_step` gets what it gave for the timestep before of the same
        environment, and this where the timestep is FIRST. A loss does the same: the state at the start of a `Sequence`
        is `data.agent_state`, and where `data.step_type` is FIRST, within the sequence too, this takes its place
        (`rlframe.agents.recurrent.SteppedNetwork.unroll`, `examples/recurrent_agent.py`).
        """
        del batch_size
        return ()

    def actor_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        """Acts, exploring, on a batch of timesteps.

        Args:
            rng: a key of jax.random.
            params: what `actor_params` gave.
            timestep: `[B, ...]`, see `rlframe.types`.
            state: what the call before returned for these environments, or `initial_state`.

        Returns:
            (output, state): actions `[B, ...]` as the action spec says, and the extras that the
            learner needs back, `[B, ...]` each.
        """
        raise NotImplementedError

    def eval_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        """Acts without exploring; as `actor_step` unless a subclass says otherwise."""
        return self.actor_step(rng, params, timestep, state)

    # Learning

    @property
    def jit_learner_step(self) -> bool:
        """Whether the Learner jits `learner_step`. False: the agent jits its own pieces."""
        return True

    @property
    def replay_spec(self) -> ReplaySpec:
        """What the agent learns from."""
        raise NotImplementedError

    def make_optimizer(self) -> optax.GradientTransformation:
        """The optimizer behind `self.optimizer`: Adam with `cfg.learning_rate`, unless overridden."""
        return optax.adam(self.cfg.learning_rate)

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """Built once, when it is first needed."""
        return self.make_optimizer()

    def initial_learner_state(self, params: Params) -> Any:
        """The state of learning at step 0: a `LearnerState`, or an agent's own with more fields.

        The key is set by `seeded`.
        """
        return LearnerState(self.optimizer.init(params), jnp.zeros((), jnp.int32), jax.random.PRNGKey(0))

    def seeded(self, learner_state: Any, rng: jax.Array) -> Any:
        """Return the learner state with the Learner's key in its field `rng`, if it has one."""
        return learner_state._replace(rng=rng) if "rng" in getattr(learner_state, "_fields", ()) else learner_state

    def loss(self, params: Params, learner_state: Any, batch: Batch) -> tuple[jax.Array, Logs]:
        """The scalar that `compute_gradients` differentiates, and what to log beside it."""
        raise NotImplementedError

    def learner_step(self, params: Params, learner_state: Any, batch: Batch) -> tuple[Params, Any, Logs]:
        """One update.

        Returns:
            (params, learner_state, logs). `logs["loss"]` and all others are one number each. The exception is
            `logs["priorities"]` `[B]`, of a prioritized replay: the Learner takes it out, and gives it to the replay.
            It is data, not a log. It is here because `loss` computes it, and returns only logs beside its value.
        """
        logs, grads = self.compute_gradients(params, learner_state, batch)
        params, opt_state, more = self.apply_gradients(params, grads, learner_state)
        learner_state = self.update_learner_state(params, opt_state, learner_state)
        return params, learner_state, {**logs, **more}

    def compute_gradients(self, params: Params, learner_state: Any, batch: Batch) -> tuple[Logs, Params]:
        """(logs, gradients) of `loss`."""
        (loss, logs), grads = jax.value_and_grad(self.loss, has_aux=True)(params, learner_state, batch)
        return {"loss": loss, **logs}, grads

    def apply_gradients(self, params: Params, grads: Params, learner_state: Any) -> tuple[Params, Any, Logs]:
        """(params, optimizer state, logs) after one step of `self.optimizer`."""
        updates, opt_state = self.optimizer.update(grads, learner_state.opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {}

    def update_learner_state(self, params: Params, opt_state: Any, learner_state: Any) -> Any:
        """The learner state after an update that gave `params`."""
        del params
        return learner_state._replace(opt_state=opt_state, steps=learner_state.steps + 1)

    def actor_params(self, params: Params, learner_state: Any) -> Tree:
        """What acting needs and training changes: the parameters, and schedules or statistics."""
        del learner_state
        return params

    def check_num_envs(self, num_envs: int) -> None:
        """Raises UsageError where batches of one item of each of `num_envs` environments cannot be learned from."""

    # What buffers and inferencers check against

    @functools.cached_property
    def step_spec(self) -> StepSpec:
        """Shapes and dtypes of one environment's step, from a trace of `actor_step`.

        Raises:
            UsageError: the actions do not have the shape and dtype of the action spec, or the state after a step not
                those of `initial_state`.
        """
        output, state = jax.eval_shape(self._act_on_zeros)
        check_tree("action", self.action_spec, output.action, owner=self.type_name)
        initial = without_batch(jax.tree.map(np.asarray, self.initial_state(1)))
        check_tree("the state after actor_step, as initial_state gives it,", initial, state, owner=self.type_name)
        return StepSpec(self.observation_spec, self.action_spec, without_batch(output.extras), without_batch(state))

    def check_observation(self, observation: Tree) -> None:
        """Raises UsageError unless `observation` is `[B, ...]` of the observation spec."""
        check_tree("observation", self.observation_spec, observation, owner=self.type_name)

    def _act_on_zeros(self) -> tuple[AgentOutput, AgentState]:
        rng = jax.random.PRNGKey(0)
        params = self.initial_params(rng)
        params = self.actor_params(params, self.initial_learner_state(params))
        return self.actor_step(rng, params, zero_timestep(self.observation_spec, 1), self.initial_state(1))


def _cached_property(function: Any, name: str) -> Any:
    made: Any = functools.cached_property(function)
    made.__set_name__(None, name)
    return made


if sys.version_info < (3, 12):
    # An agent of a user's own file is pickled with its class. Until Python 3.12 a cached property has a lock, which
    # does not pickle.
    copyreg.pickle(functools.cached_property, lambda made: (_cached_property, (made.func, made.attrname)))
