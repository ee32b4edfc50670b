"""The base class `Agent`: pure functions and a config. An agent stores no parameters.

A subclass defines how to act and what to learn from. If one gradient step per batch is enough, a subclass only
defines `loss`. Otherwise it overrides `learner_step`, or one of the three methods that `learner_step` calls.

When a subclass is defined, `check_methods` rejects misspelled methods and wrong arguments.
"""

from __future__ import annotations

import copyreg
import dataclasses
import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlframe.agents.schedules import current, current_values
from rlframe.agents.trees import check_tree, without_batch, zero_timestep, zeros_like_spec
from rlframe.errors import UsageError, suggest
from rlframe.types import AgentOutput, AgentState, Batch, Logs, Params, ReplaySpec, StepSpec, TimeStep, Tree

NetFactory = Callable[[Tree, Tree], Any]  # (observation_spec, action_spec) -> an object with init and apply
PolicyFactory = Callable[[Tree], Any]  # (action_spec) -> a distribution, see `rlframe.agents.distributions`


class LearnerState(NamedTuple):
    """Everything that learning changes, except the parameters.

    An agent with more state (target parameters, observation statistics) defines its own NamedTuple with these three
    fields and additional ones. The Learner sets `rng` from its seed. A new run that starts from another run
    (`--init-from`) loads the parameters and the field `statistics`, if there is one.
    """

    opt_state: Any
    steps: Any  # [] int32: number of learner steps. float32 if a smaller batch counts as a fraction of a step.
    rng: Any  # a key of jax.random


class TargetState(NamedTuple):
    """A `LearnerState` with the parameters of target networks."""

    opt_state: Any
    steps: Any
    rng: Any
    target_params: Params


class Agent:
    """Base class of agents.

    Every method is a pure function of its arguments, so that a caller may jit it, repeat it or run it elsewhere. An
    agent is pickled as its class and its constructor arguments.

    The definition of a subclass raises UsageError if a method has a misspelled name (`update_learnerstate`) or other
    arguments than in this class, because nothing could call such a method. Give your own methods different names, or
    start their names with `_`.

    Args:
        cfg: an instance of `config_cls`.
        observation_spec: tree of `dm_env.specs.Array` for one environment.
        action_spec: tree of `dm_env.specs.Array` for one environment.
        net_factory: None for the agent's default, a `NetworkConfig` from `rlframe.agents.networks`, or a function
            `f(observation_spec, action_spec)`. The function returns an object with `init(rng, observation)` and
            `apply(params, observation)`, where observations are `[B, ...]`. The agent's class documents the required
            output of `apply`. Your own constructor should only have this parameter if it uses the network. Without
            this parameter, `--network` is rejected.
        policy_factory: a function `f(action_spec)` that returns a distribution (`rlframe.agents.distributions`). None
            for the agent's default. Agents without a distribution, or with a fixed one, only accept None.
    """

    config_cls: type[Any] = type(None)
    network_configs: tuple[Any, ...] = ()  # network configs with this agent's default values
    takes_policy: bool = True  # whether the agent accepts a policy_factory
    # "steps" (from a replay buffer) or "trajectories" (`TokenBatch`es from a trajectory service)
    learns_from: str = "steps"
    # Methods of this class that the agent never calls -> the method that a subclass defines instead.
    replaced_methods: Mapping[str, str] = {}
    network: Any  # object with `init` and `apply`; a subclass sets it or overrides `initial_params`
    _constructed_with: tuple[tuple[Any, ...], dict[str, Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_methods(Agent, cls)
        check_config_class(cls)
        for base in cls.__mro__[1:]:
            for name, instead in vars(base).get("replaced_methods", {}).items():
                if name in vars(cls):
                    raise UsageError(f"{cls.__name__} never calls {name}. Define {instead} instead.")

    def __new__(cls, *args: Any, **kwargs: Any) -> Agent:
        check_arguments(cls, kwargs)
        agent = super().__new__(cls)
        agent._constructed_with = (args, kwargs)
        return agent

    def __reduce__(self) -> tuple[Any, ...]:
        # Networks and optimizers contain closures, which cannot be pickled. The constructor's arguments can be pickled.
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
                f"{type(self).__name__} accepts no policy_factory, because the distribution of its actions is fixed. "
                "Remove the argument. PPO and IMPALA accept a policy_factory."
            )
        self.cfg = cfg
        self.observation_spec = observation_spec
        self.action_spec = action_spec
        self.net_factory = net_factory
        self.policy_factory = policy_factory

    @property
    def type_name(self) -> str:
        """Class name of this agent, for messages. A transform returns the class name of its inner agent."""
        return type(self).__name__

    def with_config(self, cfg: Any) -> Agent:
        """Return an agent that was made with the same arguments, except for its config.

        Raises:
            UsageError: the constructor got no config.
        """
        args, kwargs = self._constructed_with
        if not any(each is self.cfg for each in (*args, *kwargs.values())):
            raise UsageError(f"{self.type_name} takes no config in its constructor, so its config cannot be replaced.")
        return type(self)(
            *(cfg if each is self.cfg else each for each in args),
            **{name: cfg if each is self.cfg else each for name, each in kwargs.items()},
        )

    def with_inner(self, change: Callable[[Agent], Agent]) -> Agent:
        """Return `change(self)`. A transform overrides this to return a transform around the changed inner agent."""
        return change(self)

    # Acting

    def initial_params(self, rng: jax.Array) -> Params:
        """Return initial parameters, a pytree of float arrays. The default implementation calls `self.network.init`."""
        return self.network.init(rng, zeros_like_spec(self.observation_spec, 1))

    def initial_state(self, batch_size: int) -> AgentState:
        """Return the recurrent state at FIRST, a pytree of `[batch_size, ...]`, or `()` if there is none.

        Row k belongs to environment k of the program, that is, to Actor k // N if each Actor has N environments. A row
        must not depend on `batch_size`. It may contain values that differ between environments, for example
        exploration rates.

        The Actor carries the state between steps. `actor_step` receives the state that it returned for the previous
        timestep of the same environment, or this initial state at FIRST. A loss must carry the state in the same way.
        The state at the start of a `Sequence` is `data.agent_state`. At each FIRST in `data.step_type`, also within the
        sequence, the initial state replaces the state (`rlframe.agents.recurrent.SteppedNetwork.unroll`,
        `examples/recurrent_agent.py`).
        """
        del batch_size
        return ()

    def actor_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        """Act on a batch of timesteps, with exploration.

        Args:
            rng: a key of jax.random.
            params: the result of `actor_params`.
            timestep: `[B, ...]`, see `rlframe.types`.
            state: the state returned by the previous call for these environments, or `initial_state`.

        Returns:
            (output, state). The output contains actions `[B, ...]` that match the action spec, and extras that the
            learner needs, `[B, ...]` each.
        """
        raise NotImplementedError

    def eval_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        """Act without exploration. The default implementation calls `actor_step`."""
        return self.actor_step(rng, params, timestep, state)

    # Learning

    @property
    def jit_learner_step(self) -> bool:
        """True if the Learner jits `learner_step`. False if the agent jits parts of it itself."""
        return True

    @property
    def replay_spec(self) -> ReplaySpec:
        """The kind of replay that the agent learns from, and the content of a batch."""
        raise NotImplementedError

    def make_optimizer(self) -> optax.GradientTransformation:
        """Return the optimizer. The default is Adam with `cfg.learning_rate`. `self.optimizer` stores the result."""
        return optax.adam(functools.partial(current, self.cfg, "learning_rate"))

    @functools.cached_property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer, built on first use."""
        return optax.with_extra_args_support(self.make_optimizer())

    def initial_learner_state(self, params: Params) -> Any:
        """Return the learner state at step 0: a `LearnerState`, or an agent's own class with more fields.

        `seeded` sets the random key later.
        """
        return LearnerState(self.optimizer.init(params), jnp.zeros((), jnp.int32), jax.random.PRNGKey(0))

    def seeded(self, learner_state: Any, rng: jax.Array) -> Any:
        """Return the learner state with `rng` in its field `rng`, if it has this field."""
        return learner_state._replace(rng=rng) if "rng" in getattr(learner_state, "_fields", ()) else learner_state

    def loss(self, params: Params, learner_state: Any, batch: Batch) -> tuple[jax.Array, Logs]:
        """Return (loss, logs). `compute_gradients` differentiates the loss, a scalar."""
        raise NotImplementedError

    def learner_step(self, params: Params, learner_state: Any, batch: Batch) -> tuple[Params, Any, Logs]:
        """Do one update.

        Returns:
            (params, learner_state, logs). Each log is one number, including `logs["loss"]`. The exception is
            `logs["priorities"]` `[B]` for a prioritized replay. The Learner removes the priorities from the logs and
            passes them to the replay. They are in the logs because `loss`, which computes them, has no other output.
        """
        logs, grads = self.compute_gradients(params, learner_state, batch)
        params, opt_state, more = self.apply_gradients(params, grads, learner_state)
        scheduled = current_values(self.cfg, lambda: learner_state.steps)
        after = self.update_learner_state(params, opt_state, learner_state)
        return params, after, {**logs, **more, **scheduled}

    def compute_gradients(self, params: Params, learner_state: Any, batch: Batch) -> tuple[Logs, Params]:
        """Return (logs, gradients) of `loss`."""
        (loss, logs), grads = jax.value_and_grad(self.loss, has_aux=True)(params, learner_state, batch)
        return {"loss": loss, **logs}, grads

    def apply_gradients(self, params: Params, grads: Params, learner_state: Any) -> tuple[Params, Any, Logs]:
        """Return (params, optimizer state, logs) after one step of `self.optimizer`."""
        updates, opt_state = self.optimizer.update(grads, learner_state.opt_state, params)
        return optax.apply_updates(params, updates), opt_state, {}

    def update_learner_state(self, params: Params, opt_state: Any, learner_state: Any) -> Any:
        """Return the learner state after an update that produced `params`."""
        del params
        return learner_state._replace(opt_state=opt_state, steps=learner_state.steps + 1)

    def actor_params(self, params: Params, learner_state: Any) -> Tree:
        """Return the values that actors receive: the parameters, and the current values of schedules or statistics."""
        del learner_state
        return params

    def check_num_envs(self, num_envs: int) -> None:
        """Raise UsageError if the agent cannot learn from batches with one item per environment (`num_envs` items)."""

    # Specs and checks, used by buffers and inferencers

    @functools.cached_property
    def step_spec(self) -> StepSpec:
        """Shapes and dtypes of one environment's step, found by tracing `actor_step`.

        Raises:
            UsageError: the actions do not match the action spec, or the state after a step does not match
                `initial_state`.
        """
        output, state = jax.eval_shape(self._act_on_zeros)
        check_tree("action", self.action_spec, output.action, owner=self.type_name)
        initial = without_batch(jax.tree.map(np.asarray, self.initial_state(1)))
        check_tree("the state after actor_step, as initial_state gives it,", initial, state, owner=self.type_name)
        return StepSpec(self.observation_spec, self.action_spec, without_batch(output.extras), without_batch(state))

    def check_observation(self, observation: Tree) -> None:
        """Raise UsageError unless `observation` is a batch `[B, ...]` that matches the observation spec."""
        check_tree("observation", self.observation_spec, observation, owner=self.type_name)

    def _act_on_zeros(self) -> tuple[AgentOutput, AgentState]:
        rng = jax.random.PRNGKey(0)
        params = self.initial_params(rng)
        params = self.actor_params(params, self.initial_learner_state(params))
        return self.actor_step(rng, params, zero_timestep(self.observation_spec, 1), self.initial_state(1))


# --- checks of subclasses


def check_methods(base: type, cls: type) -> None:
    """Raise UsageError if `cls` misspells the name of a method of `base`, or if its method takes other arguments."""
    for name, member in vars(cls).items():
        if not name.startswith("_") and (inspect.isfunction(member) or isinstance(member, property)):
            _check_method(base, cls, name, member)


def _check_method(base: type, cls: type, name: str, member: Any) -> None:
    hooks = {hook: method for hook, method in vars(base).items() if inspect.isfunction(method)}
    if name not in vars(base):
        near = difflib.get_close_matches(name, vars(base), n=1, cutoff=0.9)
        if near:
            raise UsageError(
                f"{cls.__name__} defines {name}, which is never called. The method of an Agent is {near[0]}"
                f"{_arguments(hooks.get(near[0]))}. If this is a different method, give it a different name, or a name "
                "that starts with an underscore."
            )
    elif name in hooks and inspect.isfunction(member):
        wanted, given = (list(inspect.signature(function).parameters)[1:] for function in (hooks[name], member))
        try:
            inspect.signature(member).bind(None, *wanted)
            fits = given == wanted or set(given) != set(wanted)  # The same names in a different order are an error.
        except TypeError:
            fits = False
        if not fits:
            raise UsageError(
                f"{cls.__name__}.{name} takes ({', '.join(given)}); it is called with ({', '.join(wanted)})."
            )


def _arguments(hook: Any) -> str:
    return f"({', '.join(list(inspect.signature(hook).parameters)[1:])})" if hook is not None else ""


def check_arguments(cls: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise UsageError for a named argument that the constructor of an agent's class does not accept."""
    accepted = inspect.signature(cls.__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    if kwargs.get("net_factory") is not None and not takes_all and "net_factory" not in accepted:
        raise UsageError(
            f"{cls.__name__} makes its own network and reads no net_factory. Either leave --network out, or add the "
            "parameter net_factory to the constructor and build the network from it."
        )
    for name in kwargs:
        if name not in accepted and not takes_all:
            raise UsageError(f"{cls.__name__} has no argument {name}.{suggest(name, accepted)}")


def check_config_class(cls: type) -> None:
    """Raise UsageError if `cls.config_cls` extends a dataclass, but is not declared as a dataclass itself."""
    config_cls = vars(cls).get("config_cls")
    if config_cls is None or not dataclasses.is_dataclass(config_cls):
        return
    names = {field.name for field in dataclasses.fields(config_cls)}
    for name, hint in inspect.get_annotations(config_cls).items():  # type: ignore[arg-type]
        if name not in names and "ClassVar" not in str(hint):
            raise UsageError(
                f"{config_cls.__name__}.{name} is not an option, because {config_cls.__name__} is not a dataclass. Add "  # type: ignore[union-attr]
                "@dataclasses.dataclass(frozen=True) to the class."
            )


# --- pickling


def _cached_property(function: Any, name: str) -> Any:
    prop: Any = functools.cached_property(function)
    prop.__set_name__(None, name)
    return prop


if sys.version_info < (3, 12):
    # An agent from a user's file is pickled together with its class.
    # Before Python 3.12, a cached property contains a lock, which cannot be pickled.
    copyreg.pickle(functools.cached_property, lambda prop: (_cached_property, (prop.func, prop.attrname)))
