"""Deep Q-networks (Mnih et al. 2015, doi:10.1038/nature14236), and what was added to them since."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlframe.agents import losses, noisy
from rlframe.agents.base import Agent, NetFactory, PolicyFactory
from rlframe.agents.net_factory import build_network, default_config
from rlframe.agents.networks import Head, MLPConfig, NatureCNNConfig
from rlframe.agents.policies import epsilon_greedy
from rlframe.agents.priorities import importance_weights
from rlframe.errors import UsageError, check_above, check_at_least, check_share
from rlframe.types import (
    AgentOutput,
    AgentState,
    Batch,
    Logs,
    Params,
    ReplaySpec,
    TimeStep,
    Transition,
    Tree,
    specs,
)


@dataclasses.dataclass(frozen=True)
class DQNConfig:
    """Defaults: Mnih et al. 2015, extended data table 1, and its "Training details"."""

    batch_size: int = 32
    replay_capacity: int = 1_000_000  # environment steps
    min_replay_size: int = 50_000  # items there are before learning begins
    update_period: int = 4  # environment steps for each learner step
    target_update_period: int = 10_000  # learner steps
    discount: float = 0.99
    epsilon_begin: float = 1.0  # chance of a random action
    epsilon_end: float = 0.1
    epsilon_decay_steps: int = 1_000_000  # environment steps from the first update on
    # A random action is repeated for n steps with a chance proportional to n^-exponent (Dabney et al. 2020,
    # arXiv:2006.01782, who use 2): exploration that gets somewhere. None: for one step.
    exploration_duration_exponent: float | None = None
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"  # centred, decay 0.95, epsilon 0.01 (of a sum over the batch)
    learning_rate: float = 2.5e-4
    adam_epsilon: float = 1e-8  # of `adam` only; Kingma and Ba 2015
    max_grad_norm: float | None = None
    huber_threshold: float | None = 1.0  # where the squared error becomes linear; None: never
    anneal_learning_rate: bool = False  # linearly to 0 over total_learner_steps
    total_learner_steps: int | None = None  # what annealing ends at; None: it does not begin
    double: bool = False  # van Hasselt et al. 2016
    dueling: bool = False  # Wang et al. 2016: advantages and values, with a hidden layer each
    n_step: int = 1  # rewards summed before bootstrapping
    # Vieillard et al. 2020, arXiv:2007.14430, whose numbers these are: targets of a soft policy, and a bonus for what
    # that policy likes.
    munchausen: bool = False
    munchausen_scale: float = 0.9  # alpha, of the bonus
    munchausen_temperature: float = 0.03  # tau, of the policy
    munchausen_clip: float = -1.0  # l_0, the lowest tau log pi in the bonus
    num_quantiles: int | None = None  # of each action's return, in place of its mean; 200 in Dabney et al. 2018
    # Values of each action's return whose chances the network gives, in place of its mean; 51 in Bellemare et al. 2017.
    num_atoms: int | None = None
    value_min: float = -10.0  # the lowest and highest of these values: returns beyond are taken for them
    value_max: float = 10.0
    # Noisy dense layers (Fortunato et al. 2018): the deviation to begin with, times sqrt(inputs); 0.5 there. Explores
    # instead of random actions: let epsilon be 0.
    noisy: float | None = None
    prioritised: bool = False  # Schaul et al. 2016, proportional
    priority_exponent: float = 0.6  # alpha
    importance_exponent: float = 0.4  # beta at the beginning; 1 at total_learner_steps

    def __post_init__(self) -> None:
        check_at_least(self, 1, "batch_size", "min_replay_size", "update_period", "target_update_period", "n_step")
        check_share(self, "discount", "epsilon_begin", "epsilon_end")
        check_at_least(self, 1, "total_learner_steps")
        check_at_least(self, 0, "epsilon_decay_steps", "munchausen_scale", "priority_exponent", "importance_exponent")
        check_above(self, 0, "learning_rate", "adam_epsilon", "max_grad_norm", "huber_threshold")
        check_above(self, 0, "noisy", "munchausen_temperature")
        check_above(self, 1, "exploration_duration_exponent")
        other_targets = (self.double, self.n_step > 1, self.num_quantiles is not None, self.num_atoms is not None)
        if self.munchausen and any(other_targets):
            raise UsageError(
                "DQNConfig.munchausen has targets of its own, means of one step by the target network alone; got "
                f"double={self.double}, n_step={self.n_step}, num_quantiles={self.num_quantiles}, "
                f"num_atoms={self.num_atoms}. Leave them False, 1, None and None."
            )
        if not self.munchausen_clip <= 0.0:  # logarithms of chances are below 0
            raise UsageError(f"DQNConfig.munchausen_clip must be at most 0, got {self.munchausen_clip}.")
        if self.num_quantiles is not None and (self.num_quantiles < 1 or self.huber_threshold is None):
            raise UsageError(
                "DQNConfig.num_quantiles must be at least 1 (or None) and needs a huber_threshold, got "
                f"num_quantiles={self.num_quantiles}, huber_threshold={self.huber_threshold}."
            )
        has_values = -math.inf < self.value_min < self.value_max < math.inf
        if self.num_atoms is not None and (self.num_atoms < 2 or not has_values):
            raise UsageError(
                "DQNConfig.num_atoms must be at least 2 (or None), and value_min below value_max, both finite, got "
                f"num_atoms={self.num_atoms}, value_min={self.value_min}, value_max={self.value_max}."
            )
        if self.num_atoms is not None and self.num_quantiles is not None:
            raise UsageError(
                "DQNConfig.num_atoms and num_quantiles are two ways to learn a return's distribution, got "
                f"{self.num_atoms} and {self.num_quantiles}: leave one None."
            )
        if self.optimizer not in ("rmsprop", "adam"):
            raise UsageError(f"DQNConfig.optimizer must be 'rmsprop' or 'adam', got {self.optimizer!r}.")
        if self.min_replay_size > self.replay_capacity:
            raise UsageError(
                f"DQNConfig.min_replay_size ({self.min_replay_size}) is above replay_capacity "
                f"({self.replay_capacity}): learning would never begin."
            )


class ActorParams(NamedTuple):
    """What a DQN actor acts by."""

    params: Params  # of the network
    epsilon: Any  # [] float32


class DQNState(NamedTuple):
    """A `LearnerState`, with the target network's parameters."""

    opt_state: Any
    steps: Any
    rng: Any
    target_params: Params


class Repetition(NamedTuple):
    """The state of an actor that repeats its random actions."""

    action: Any  # [B]
    steps_left: Any  # [B] int32: how often more


_MAX_DURATION = 1_000  # longer ones would have a chance of 0.0006, at the exponent 2


class DQN(Agent):
    """Q-learning with a target network and replay, for discrete actions.

    A network's `apply` gives action values `[B, A]`, or for dueling (advantages `[B, A]`, value `[B, 1]`). With N
    quantiles or atoms it gives N numbers in the place of each: `[B, A N]`, the N of the first action first; `[B, N]`.
    """

    config_cls = DQNConfig
    takes_policy = False
    networks = (MLPConfig(activation="relu", orthogonal=False), NatureCNNConfig(orthogonal=False))

    def __init__(
        self,
        cfg: DQNConfig,
        observation_spec: Tree,
        action_spec: Tree,
        net_factory: NetFactory | None = None,
        policy_factory: PolicyFactory | None = None,
    ) -> None:
        super().__init__(cfg, observation_spec, action_spec, net_factory, policy_factory)
        if not isinstance(action_spec, specs.DiscreteArray):
            raise UsageError(f"DQN needs Discrete actions, got the action spec {action_spec!r}. Use SAC or PPO.")
        self._num_actions = action_spec.num_values
        count = cfg.num_quantiles or cfg.num_atoms or 1
        plain = (Head(self._num_actions * count),)
        dueling = (Head(self._num_actions * count, own_layer=True), Head(count, own_layer=True))
        heads, other_heads = (dueling, plain) if cfg.dueling else (plain, dueling)
        factory = net_factory or default_config(self.networks, observation_spec)
        self.network = build_network(factory, observation_spec, action_spec, heads, other_heads)

    def initial_params(self, rng: jax.Array) -> Params:
        params = super().initial_params(rng)
        return params if self.cfg.noisy is None else noisy.with_deviations(params, self.cfg.noisy)

    # Acting

    def actor_step(
        self, rng: jax.Array, params: ActorParams, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        greedy = self._greedy(params.params, timestep.observation, jax.random.fold_in(rng, 2))
        chosen, explores = epsilon_greedy(rng, greedy, params.epsilon, self._num_actions)
        if self.cfg.exploration_duration_exponent is None:
            return AgentOutput(chosen, {}), state
        repeats = state.steps_left > 0
        duration = self._duration(jax.random.fold_in(rng, 1), greedy.shape)
        action = jnp.where(repeats, state.action, chosen)
        steps_left = jnp.where(repeats, state.steps_left, jnp.where(explores, duration, 1)) - 1
        return AgentOutput(action, {}), Repetition(action, steps_left)

    def initial_state(self, batch_size: int) -> AgentState:
        if self.cfg.exploration_duration_exponent is None:
            return ()
        zeros = np.zeros((batch_size,), np.int32)
        return Repetition(zeros.astype(self.action_spec.dtype), zeros)

    def _duration(self, rng: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """int32 `shape`: n with a chance proportional to n^-exponent, from 1 to _MAX_DURATION."""
        chances = np.arange(1, _MAX_DURATION + 1, dtype=np.float64) ** -self.cfg.exploration_duration_exponent
        below = jnp.asarray(np.cumsum(chances)[:-1] / chances.sum(), jnp.float32)
        return 1 + jnp.searchsorted(below, jax.random.uniform(rng, shape)).astype(jnp.int32)

    def eval_step(
        self, rng: jax.Array, params: ActorParams, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        return AgentOutput(self._greedy(params.params, timestep.observation), {}), state

    def actor_params(self, params: Params, learner_state: DQNState) -> ActorParams:
        cfg = self.cfg
        done = jnp.minimum(learner_state.steps * (cfg.update_period / max(cfg.epsilon_decay_steps, 1)), 1.0)
        epsilon = cfg.epsilon_begin + done * (cfg.epsilon_end - cfg.epsilon_begin)
        return ActorParams(params, jnp.asarray(epsilon, jnp.float32))

    # Learning

    @property
    def replay_spec(self) -> ReplaySpec:
        cfg = self.cfg
        return ReplaySpec(
            kind="prioritised" if cfg.prioritised else "uniform",
            item=Transition(cfg.n_step, cfg.discount),
            batch_size=cfg.batch_size,
            capacity=cfg.replay_capacity,
            min_size=cfg.min_replay_size,
            samples_per_insert=cfg.batch_size / cfg.update_period,
            priority_exponent=cfg.priority_exponent,
        )

    def make_optimizer(self) -> optax.GradientTransformation:
        cfg = self.cfg
        rate: Any = cfg.learning_rate
        if cfg.anneal_learning_rate and cfg.total_learner_steps is not None:
            rate = optax.linear_schedule(cfg.learning_rate, 0.0, cfg.total_learner_steps)
        if cfg.optimizer == "adam":
            optimizer = optax.adam(rate, eps=cfg.adam_epsilon)
        else:
            # The paper's epsilon of 0.01 is for gradients of sums over the batch; these are of means (dqn_zoo,
            # dqn/run_atari.py, has 0.01 / 32^2 for the same reason).
            optimizer = optax.rmsprop(rate, decay=0.95, eps=0.01 / cfg.batch_size**2, centered=True)
        clip = optax.clip_by_global_norm(cfg.max_grad_norm) if cfg.max_grad_norm else optax.identity()
        return optax.chain(clip, optimizer)

    def initial_learner_state(self, params: Params) -> DQNState:
        opt_state, steps, rng = super().initial_learner_state(params)
        return DQNState(opt_state, steps, rng, target_params=params)

    def loss(self, params: Params, learner_state: DQNState, batch: Batch) -> tuple[jax.Array, Logs]:
        if self._is_distributional:
            return self._distributional_loss(params, learner_state, batch)
        data = batch.data
        online, target, selecting = self._sampled(params, learner_state)
        values = self._values(online, data.observation)
        next_values = self._values(target, data.next_observation)
        if self.cfg.munchausen:
            target_values = self._values(target, data.observation)
            errors = losses.munchausen_errors(
                values,
                data.action,
                data.reward,
                data.discount,
                target_values,
                next_values,
                scale=self.cfg.munchausen_scale,
                temperature=self.cfg.munchausen_temperature,
                clip=self.cfg.munchausen_clip,
            )
        else:
            selectors = self._values(selecting, data.next_observation) if self.cfg.double else next_values
            errors = losses.td_errors(values, data.action, data.reward, data.discount, next_values, selectors)
        logs = {"value": jnp.mean(values), "td_error": jnp.mean(jnp.abs(errors))}
        elementwise = losses.huber(errors, self.cfg.huber_threshold)
        return self._weighed(elementwise, jnp.abs(errors), logs, learner_state, batch)

    def _distributional_loss(self, params: Params, learner_state: DQNState, batch: Batch) -> tuple[jax.Array, Logs]:
        cfg, data = self.cfg, batch.data
        online, target, selecting = self._sampled(params, learner_state)
        outputs = self._distributions(online, data.observation)
        following = self._distributions(target, data.next_observation)
        selectors = self._distributions(selecting, data.next_observation) if cfg.double else following
        steps = (outputs, data.action, data.reward, data.discount, following, self._means(selectors))
        if cfg.num_quantiles is not None:
            elementwise = losses.quantile_errors(*steps, cfg.huber_threshold)
        else:
            elementwise = losses.categorical_errors(*steps, self._support)
        logs = {"value": jnp.mean(self._means(outputs)), "td_error": jnp.mean(elementwise)}
        return self._weighed(elementwise, elementwise, logs, learner_state, batch)

    def _weighed(
        self, elementwise: jax.Array, priorities: jax.Array, logs: Logs, learner_state: DQNState, batch: Batch
    ) -> tuple[jax.Array, Logs]:
        """(loss, logs) of the losses [B] of a batch: as they are, or corrected for how they were drawn."""
        if not self.cfg.prioritised:
            return jnp.mean(elementwise), logs
        weights = importance_weights(batch.probabilities, self._importance_exponent(learner_state.steps))
        # Schaul et al. 2016, section 3.3: never 0
        return jnp.mean(weights * elementwise), {**logs, "priorities": priorities + 1e-6}

    def update_learner_state(self, params: Params, opt_state: Any, learner_state: DQNState) -> DQNState:
        learner_state = super().update_learner_state(params, opt_state, learner_state)
        target = optax.periodic_update(
            params, learner_state.target_params, learner_state.steps, self.cfg.target_update_period
        )
        return learner_state._replace(target_params=target)

    def _importance_exponent(self, steps: jax.Array) -> Any:
        if self.cfg.total_learner_steps is None:
            return self.cfg.importance_exponent
        done = jnp.minimum(steps / self.cfg.total_learner_steps, 1.0)
        return self.cfg.importance_exponent + done * (1.0 - self.cfg.importance_exponent)

    def _values(self, params: Params, observation: Tree) -> jax.Array:
        """[B, A]"""
        if self._is_distributional:
            return self._means(self._distributions(params, observation))
        return losses.action_values(self.network.apply(params, observation))

    @property
    def _is_distributional(self) -> bool:
        return self.cfg.num_quantiles is not None or self.cfg.num_atoms is not None

    @property
    def _support(self) -> jax.Array:
        """[N], the values of the atoms."""
        return jnp.linspace(self.cfg.value_min, self.cfg.value_max, self.cfg.num_atoms)

    def _distributions(self, params: Params, observation: Tree) -> jax.Array:
        """[B, A, N]: quantiles, in the order of their shares of the return's distribution, or logits of the atoms."""
        outputs = self.network.apply(params, observation)
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        shaped = [output.reshape(len(output), -1, self.cfg.num_quantiles or self.cfg.num_atoms) for output in outputs]
        if len(shaped) == 1:
            return shaped[0]
        advantages, value = shaped
        return value + advantages - jnp.mean(advantages, axis=1, keepdims=True)

    def _means(self, distributions: jax.Array) -> jax.Array:
        """[B, A] of [B, A, N]."""
        if self.cfg.num_quantiles is not None:
            return jnp.mean(distributions, axis=-1)
        return jax.nn.softmax(distributions) @ self._support

    def _sampled(self, params: Params, learner_state: DQNState) -> tuple[Params, Params, Params]:
        """The network's parameters for values, for target values and for choices, each with noise of its own."""
        target = learner_state.target_params
        if self.cfg.noisy is None:
            return params, target, params
        rngs = jax.random.split(jax.random.fold_in(learner_state.rng, learner_state.steps), 3)
        online, target, selecting = map(noisy.sampled, rngs, (params, target, params))
        return online, target, selecting

    def _greedy(self, params: Params, observation: Tree, rng: jax.Array | None = None) -> jax.Array:
        """[B]; by noisy parameters where there is an `rng`, and noise in them."""
        if self.cfg.noisy is not None:
            params = params.mean if rng is None else noisy.sampled(rng, params)
        values = self._values(params, observation)
        return jnp.argmax(values, axis=-1).astype(self.action_spec.dtype)
