"""IMPALA (Espeholt et al. 2018, arXiv:1802.01561): an actor-critic that can learn from actions of older policies."""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from rlframe.agents import losses
from rlframe.agents.actor_critic import ActorCritic
from rlframe.agents.base import LearnerState
from rlframe.agents.networks import NatureCNNConfig
from rlframe.agents.returns import vtrace
from rlframe.agents.schedules import Scheduled, check_schedules, clip_gradients, current, scheduled
from rlframe.agents.trees import swap_batch_and_time
from rlframe.errors import UsageError, check_above, check_at_least, check_fraction
from rlframe.types import LAST, Batch, Logs, Params, ReplaySpec, Sequence


@dataclasses.dataclass(frozen=True)
class IMPALAConfig:
    """Defaults from Espeholt et al. 2018, table G.1 (Atari), and from the authors' code (scalable_agent).

    As in that code, the loss is a sum over the batch, not a mean. The defaults of the learning rate, epsilon and the
    maximum gradient norm are for this sum. Logs are means.
    """

    unroll_length: int = 20  # steps of one environment in each unroll
    batch_size: int = 32  # unrolls per update
    discount: float = 0.99
    rho_bar: float = 1.0  # upper limit of importance weights; section 5.2.2
    c_bar: float = 1.0  # upper limit of importance weights in the trace, at most rho_bar; section 5.2.2
    vtrace_lambda: float = 1.0  # lambda of remark 2; the authors' code has no lambda, which is equivalent to 1
    value_cost: float = 0.5  # weight of the value loss, half the squared error (scalable_agent/experiment.py)
    entropy_cost: Scheduled = scheduled(0.01)
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"  # "rmsprop" uses no momentum
    learning_rate: Scheduled = scheduled("linear:6e-4:0", above=0)  # number or schedule
    total_learner_steps: int | None = None  # Internal: number of updates in the run. Schedules end there.
    rmsprop_decay: float = 0.99  # scalable_agent/experiment.py
    rmsprop_epsilon: float = 0.01  # added inside the square root, as in TensorFlow; scalable_agent uses 0.1 for DMLab
    adam_epsilon: float = 1e-8  # for `adam` only; Kingma and Ba 2015
    max_grad_norm: float | None = 40.0

    def __post_init__(self) -> None:
        check_at_least(self, 1, "unroll_length", "batch_size")
        check_fraction(self, "discount", "vtrace_lambda", "rmsprop_decay")
        check_at_least(self, 1, "total_learner_steps")
        check_above(self, 0, "rho_bar", "c_bar", "rmsprop_epsilon", "adam_epsilon", "max_grad_norm")
        check_schedules(self)
        if self.c_bar > self.rho_bar:  # section 4.1
            raise UsageError(f"IMPALAConfig.c_bar ({self.c_bar}) must be at most rho_bar ({self.rho_bar}).")
        if self.optimizer not in ("rmsprop", "adam"):
            raise UsageError(f"IMPALAConfig.optimizer must be 'rmsprop' or 'adam', got {self.optimizer!r}.")


class IMPALA(ActorCritic):
    """Actor-critic with V-trace, for discrete, multi-discrete and bounded continuous actions.

    The paper's network is recurrent. Initial weights are from Sonnet's truncated normal distribution, as in the paper.
    """

    config_cls = IMPALAConfig
    network_configs = (NatureCNNConfig(orthogonal=False),)

    @property
    def replay_spec(self) -> ReplaySpec:
        cfg = self.cfg
        # Capacity of two batches: one waits for the learner, and actors fill the other. More would make data older.
        capacity = 2 * cfg.batch_size * cfg.unroll_length
        return ReplaySpec("queue", Sequence(cfg.unroll_length), batch_size=cfg.batch_size, capacity=capacity)

    def make_optimizer(self) -> optax.GradientTransformation:
        cfg, rate = self.cfg, functools.partial(current, self.cfg, "learning_rate")
        if cfg.optimizer == "adam":
            optimizer = optax.adam(rate, eps=cfg.adam_epsilon)
        else:
            # TensorFlow's RMSProp, which the paper used, starts with a mean square of 1.
            optimizer = optax.rmsprop(rate, cfg.rmsprop_decay, cfg.rmsprop_epsilon, initial_scale=1.0)
        return clip_gradients(cfg.max_grad_norm, optimizer)

    def loss(self, params: Params, learner_state: LearnerState, batch: Batch) -> tuple[jax.Array, Logs]:
        cfg, data = self.cfg, batch.data
        (logits, values), _ = self._stepped.unroll(params, data.observation, data.step_type, data.agent_state)
        logits, values = swap_batch_and_time(logits), swap_batch_and_time(values.reshape(data.step_type.shape))
        sample = swap_batch_and_time(self.samples(data))
        mask = swap_batch_and_time(data.step_type[:, :-1] != LAST).astype(jnp.float32)
        log_probs = jax.vmap(self.distribution.log_prob)(logits[:-1], sample)
        rhos = jnp.exp(log_probs - swap_batch_and_time(data.extras["log_prob"]))
        returns = vtrace(
            values,
            swap_batch_and_time(data.reward),
            cfg.discount * swap_batch_and_time(data.discount),
            rhos,
            mask,
            rho_bar=cfg.rho_bar,
            c_bar=cfg.c_bar,
            lambda_=cfg.vtrace_lambda,
        )
        mean = functools.partial(losses.masked_mean, mask=mask)
        policy_loss = -mean(log_probs * returns.advantages)
        value_loss = mean(0.5 * jnp.square(returns.targets - values[:-1]))
        entropy = mean(jax.vmap(self.distribution.entropy)(logits[:-1]))
        entropy_cost = current(cfg, "entropy_cost", learner_state.steps)
        loss = policy_loss + cfg.value_cost * value_loss - entropy_cost * entropy
        logs = {
            "loss": loss,  # in the logs, the mean replaces the sum that is differentiated
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            # 1 for on-policy data; smaller for data of a different policy
            "clipped_rho": mean(jnp.minimum(cfg.rho_bar, rhos)),
        }
        return loss * jnp.sum(mask), logs
