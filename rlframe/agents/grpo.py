"""GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300): a language model learns from scored groups of its answers.

Beside it, on the same batches: plain policy gradient, DPO on the groups' preferences, and supervised cross-entropy.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any, Literal, NamedTuple, Union

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlframe.agents import losses
from rlframe.agents.base import Agent, NetFactory, PolicyFactory
from rlframe.agents.losses import Average
from rlframe.agents.optimizers import clipped
from rlframe.agents.trees import zero_timestep
from rlframe.errors import UsageError, check_above, check_at_least
from rlframe.language.model import ModelConfig, transformer, weights
from rlframe.types import (
    AgentOutput,
    AgentState,
    Batch,
    Logs,
    Params,
    ReplaySpec,
    Sequence,
    TimeStep,
    TokenBatch,
    Tree,
    specs,
)


@dataclasses.dataclass(frozen=True)
class GRPOConfig:
    """Defaults: Shao et al. 2024, section 4.2; where it is silent, PPO's.

    A batch's padding decides the shapes that an update is compiled for; `TrajectoryBuffer` has few of them.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)  # of random weights; not read with `weights`
    weights: Union[str, None] = None  # a folder in the published format: see `rlframe.language.model.weights`
    dtype: Literal["float32", "bfloat16", None] = None  # of the weights; None: what the model's config says
    max_tokens: int = 1024  # of a sequence, with its prompt
    batch_size: int = 1024  # sequences for each update
    loss: Literal["grpo", "policy_gradient", "dpo", "sft"] = "grpo"
    normalize_std: bool = True  # divide advantages by their group's standard deviation; False: Dr. GRPO
    average: Average = "sequence"  # of tokens within sequences, then of these; "token": of all tokens, DAPO
    clip_epsilon: float = 0.2  # grpo: the ratio to the policy that sampled is clipped to 1 - it, 1 + it
    clip_epsilon_high: Union[float, None] = None  # ... to 1 + this, for DAPO's clip-higher (0.28); None: the same
    # What was sampled by much older parameters counts by at most this ratio: grpo, where the advantage is negative;
    # policy_gradient, always. None: no bound. Ye et al. 2020, arXiv:1912.09729.
    ratio_cap: Union[float, None] = 3.0
    kl_cost: float = 0.04  # to the reference: the initial parameters, or the batch's ref_logprobs; 0: none is kept
    dpo_beta: float = 0.1  # dpo; Rafailov et al. 2023, arXiv:2305.18290, appendix B
    learning_rate: float = 1e-6
    learning_rate_rise: int = 0  # updates until the learning rate is reached, from 0, in a line
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0  # of matrices (Loshchilov and Hutter 2019, AdamW)
    max_grad_norm: Union[float, None] = 1.0
    micro_batch_size: Union[int, None] = None  # sequences whose gradient is computed at once; None: the batch
    remat: bool = False  # compute layers a second time for the gradient, and keep less
    logits_chunk: Union[int, None] = None  # positions of a sequence whose logits are kept at once; None: all
    master_weights: bool = True  # of a bfloat16 model: the optimizer has a float32 copy, which small updates reach
    # The supervised warm-up, which comes first: `rlframe.language.warm_up`.
    supervised_steps: int = 0  # updates; 0: there is none
    supervised_batch_size: int = 64  # demonstrations for each
    supervised_learning_rate: float = 1e-5

    def __post_init__(self) -> None:
        if self.weights is not None:  # once: an environment may change the directory
            object.__setattr__(self, "weights", os.path.abspath(self.weights))
        check_at_least(self, 1, "max_tokens", "batch_size", "micro_batch_size", "logits_chunk", "supervised_batch_size")
        check_above(self, 0, "learning_rate", "supervised_learning_rate", "max_grad_norm")
        check_above(self, 0, "clip_epsilon", "clip_epsilon_high", "ratio_cap", "dpo_beta")
        check_at_least(self, 0, "kl_cost", "learning_rate_rise", "weight_decay", "supervised_steps")
        if self.clip_epsilon >= 1.0:
            raise UsageError(f"GRPOConfig.clip_epsilon must be below 1, got {self.clip_epsilon}.")
        if self.loss == "dpo" and self.micro_batch_size is not None:
            raise UsageError(
                "GRPOConfig.micro_batch_size must be None for the loss dpo: its pairs need the whole batch."
            )

    @property
    def has_reference(self) -> bool:
        """Whether the loss looks at a reference."""
        return self.loss == "dpo" or (self.loss != "sft" and self.kl_cost > 0)

    @property
    def model_config(self) -> ModelConfig:
        """What the model is: `model`, or what the folder `weights` says, with `dtype`.

        Raises:
            CheckpointError: there is no such folder, or no `config.json` in it.
            UsageError: the model's architecture is not implemented.
        """
        if self.weights is not None:
            return weights.read_config(self.weights, dtype=self.dtype)
        return dataclasses.replace(self.model, dtype=self.dtype) if self.dtype else self.model


class KeyValueState(NamedTuple):
    """What acting remembers of B sequences."""

    cache: transformer.Cache  # of the tokens so far
    lengths: Any  # [B] int32: how many they are


class OptimizerState(NamedTuple):
    """The optimizer's state."""

    inner: Any  # of optax
    master: Any  # float32 parameters, where the model's are narrower; otherwise ()


class GRPOState(NamedTuple):
    """A `LearnerState`, with the reference."""

    opt_state: OptimizerState
    steps: Any
    rng: Any
    reference_params: Params  # the parameters as they were at first; () where the loss looks at no reference


class _Rows(NamedTuple):
    """What the loss takes of each of S sequences; `[S, T]` are of the tokens but the first."""

    tokens: Any  # [S, T + 1]
    mask: Any  # [S, T]
    weights: Any  # [S, T]: of the batch's mean
    advantages: Any  # [S, T]
    temperature: Any  # [S]: of the sampling; None: 1
    sampled: Any  # [S, T]: log-probabilities under the policy that sampled; None: taken to be the present one
    reference: Any  # [S, T]: log-probabilities under the reference; None: computed


class GRPO(Agent):
    """Trains a language model from `TokenBatch`es, which a `TrajectoryBuffer` gives.

    Advantages are those that a group was sent with, token by token, or else its normalized scores. The losses `grpo`
    and `policy_gradient` compute log-probabilities at the batch's `temperature`.

    A step of acting is one token: the observation is the last token (of the prompt, or the action before), the action
    is the next one. All of them must fit into `max_tokens`. (`rlframe.language.DecodeEngine` decodes many sequences
    faster.)

    `initial_params` are random, or those of the folder `cfg.weights`, which has to be there wherever the agent is.

    Args:
        cfg: see `GRPOConfig`.
        observation_spec, action_spec: None, or the tokens that they are in any case.
        net_factory, policy_factory: None: the network is the model.

    Raises:
        UsageError: the specs are not those of the model's tokens, or sequences are longer than it takes.
        CheckpointError: the folder is not there, or holds no model.
    """

    config_cls = GRPOConfig
    takes_policy = False
    learns_from = "trajectories"

    def __init__(
        self,
        cfg: GRPOConfig,
        observation_spec: Tree = None,
        action_spec: Tree = None,
        net_factory: NetFactory | None = None,
        policy_factory: PolicyFactory | None = None,
    ) -> None:
        super().__init__(cfg, observation_spec, action_spec, net_factory, policy_factory)
        if net_factory is not None:
            raise UsageError("GRPO takes no network: GRPOConfig.model or .weights says what it trains.")
        self.model_config = cfg.model_config
        if cfg.max_tokens > self.model_config.max_position_embeddings:
            raise UsageError(
                f"GRPOConfig.max_tokens is {cfg.max_tokens}; the model's max_position_embeddings are "
                f"{self.model_config.max_position_embeddings}."
            )
        token = specs.DiscreteArray(self.model_config.vocab_size, np.int32, "token")
        for name, spec in (("observation_spec", observation_spec), ("action_spec", action_spec)):
            if spec is not None and spec != token:
                raise UsageError(f"GRPO's {name} is a token of its model, {token}, got {spec}.")
        self.observation_spec = self.action_spec = token

    # Acting

    def initial_params(self, rng: jax.Array) -> Params:
        if self.cfg.weights is not None:
            return weights.load(self.cfg.weights, dtype=self.cfg.dtype)[1]
        return transformer.init(rng, self.model_config)

    def initial_state(self, batch_size: int) -> KeyValueState:
        cache = transformer.init_cache(self.model_config, batch_size, self.cfg.max_tokens)
        return KeyValueState(cache, jnp.zeros(batch_size, jnp.int32))

    def actor_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        logits, state = self._read(params, timestep, state)
        token = jax.random.categorical(rng, logits).astype(jnp.int32)
        log_prob = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=-1)[:, 0]
        return AgentOutput(token, {"log_prob": log_prob}), state

    def eval_step(
        self, rng: jax.Array, params: Tree, timestep: TimeStep, state: AgentState
    ) -> tuple[AgentOutput, AgentState]:
        logits, state = self._read(params, timestep, state)
        return AgentOutput(jnp.argmax(logits, axis=-1).astype(jnp.int32), {}), state

    def _read(self, params: Params, timestep: TimeStep, state: KeyValueState) -> tuple[jax.Array, KeyValueState]:
        """(logits `[B, V]` of the token after the one observed, the state with that in it)."""
        tokens = jnp.asarray(timestep.observation)[:, None]
        logits, cache = transformer.apply_cached(params, self.model_config, tokens, state.cache, state.lengths)
        return logits[:, 0], KeyValueState(cache, state.lengths + 1)

    def _act_on_zeros(self) -> tuple[AgentOutput, AgentState]:
        # Random weights, which are only traced, whatever the real ones are: a folder would be read.
        rng = jax.random.PRNGKey(0)
        params = transformer.init(rng, self.model_config)
        return self.actor_step(rng, params, zero_timestep(self.observation_spec, 1), self.initial_state(1))

    # Learning

    @property
    def replay_spec(self) -> ReplaySpec:
        cfg = self.cfg
        capacity = cfg.batch_size * cfg.max_tokens
        return ReplaySpec("queue", Sequence(cfg.max_tokens), batch_size=cfg.batch_size, capacity=capacity)

    def make_optimizer(self) -> optax.GradientTransformation:
        cfg = self.cfg
        adam = optax.adamw(
            self._learning_rate,
            cfg.adam_b1,
            cfg.adam_b2,
            cfg.adam_epsilon,
            weight_decay=cfg.weight_decay,
            mask=functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1),
        )
        return clipped(cfg.max_grad_norm, adam)

    def initial_learner_state(self, params: Params) -> GRPOState:
        master = _widened(params) if self.cfg.master_weights and self.model_config.dtype != "float32" else ()
        opt_state = OptimizerState(self.optimizer.init(master or params), master)
        reference = params if self.cfg.has_reference else ()
        return GRPOState(opt_state, jnp.zeros((), jnp.int32), jax.random.PRNGKey(0), reference)

    def loss(self, params: Params, learner_state: GRPOState, batch: Batch) -> tuple[jax.Array, Logs]:
        if self.cfg.loss == "dpo":
            return self._preference_loss(params, learner_state.reference_params, batch.data)
        return self._loss_of_rows(params, learner_state.reference_params, self._rows(batch.data))

    def compute_gradients(self, params: Params, learner_state: GRPOState, batch: Batch) -> tuple[Logs, Params]:
        S, size = len(batch.data.tokens), self.cfg.micro_batch_size
        if size is None or size >= S:
            logs, grads = super().compute_gradients(params, learner_state, batch)
        else:
            logs, grads = self._accumulate(params, learner_state.reference_params, self._rows(batch.data), size)
        data = batch.data
        logs |= {
            "reward": jnp.sum(data.scores / S),  # a sum of the largest scores would be infinite
            "length": jnp.sum(data.mask) / S,  # tokens that were sampled, of a sequence
            "tokens": jnp.sum(data.lengths),  # of the batch, without padding
            "grad_norm": optax.global_norm(grads),
            "learning_rate": self._learning_rate(learner_state.steps),
        }
        return logs, grads

    def apply_gradients(self, params: Params, grads: Params, learner_state: GRPOState) -> tuple[Params, Any, Logs]:
        inner, master = learner_state.opt_state
        if not master:
            updates, inner = self.optimizer.update(grads, inner, params)
            return optax.apply_updates(params, updates), OptimizerState(inner, master), {}
        updates, inner = self.optimizer.update(_widened(grads), inner, master)
        master = optax.apply_updates(master, updates)
        params = jax.tree.map(lambda leaf, new: new.astype(leaf.dtype), params, master)
        return params, OptimizerState(inner, master), {}

    def _accumulate(self, params: Params, reference: Params, rows: _Rows, size: int) -> tuple[Logs, Params]:
        """As `compute_gradients`, of `size` sequences at a time: losses and logs are sums over the sequences."""
        missing = -len(rows.tokens) % size
        parts = jax.tree.map(
            lambda x: jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))).reshape(-1, size, *x.shape[1:]), rows
        )
        gradient = jax.value_and_grad(self._loss_of_rows, has_aux=True)

        def add(total: Any, part: _Rows) -> tuple[Any, None]:
            (_, logs), grads = gradient(params, reference, part)
            return jax.tree.map(jnp.add, total, (logs, _widened(grads))), None

        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(lambda: self._loss_of_rows(params, reference, first)[1])
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (shapes, params))
        (logs, grads), _ = jax.lax.scan(add, zeros, parts)
        return logs, grads

    def _rows(self, data: TokenBatch) -> _Rows:
        cfg, mask = self.cfg, data.mask[:, 1:]
        relative = losses.group_advantages(data.scores, data.group, normalize_std=cfg.normalize_std)
        advantages = jnp.where(data.has_advantages[:, None], data.advantages[:, 1:], relative[:, None] * mask)
        return _Rows(
            tokens=data.tokens,
            mask=mask,
            weights=losses.token_weights(mask, cfg.average),
            advantages=jnp.clip(advantages, -losses.LARGEST_ADVANTAGE, losses.LARGEST_ADVANTAGE),
            temperature=data.temperature,
            sampled=None if data.inference_logprobs is None else data.inference_logprobs[:, 1:],
            reference=None if data.ref_logprobs is None else data.ref_logprobs[:, 1:],
        )

    def _loss_of_rows(self, params: Params, reference: Params, rows: _Rows) -> tuple[jax.Array, Logs]:
        """A sum over the tokens, each with its weight in the batch's mean; so are the logs."""
        cfg, mean = self.cfg, functools.partial(_weighted_sum, weights=rows.weights)
        if cfg.loss == "sft":
            loss = -mean(self._log_probs(params, rows.tokens))
            return loss, {"loss": loss}
        log_probs = self._log_probs(params, rows.tokens, rows.temperature)
        sampled = jax.lax.stop_gradient(log_probs) if rows.sampled is None else rows.sampled
        ratio = jnp.exp(losses.log_ratio(log_probs, sampled, rows.mask))
        if cfg.loss == "grpo":
            clip = cfg.clip_epsilon, cfg.clip_epsilon_high or cfg.clip_epsilon
            policy_loss = mean(losses.clipped_surrogate(ratio, rows.advantages, *clip, cfg.ratio_cap))
            is_clipped = losses.is_clipped(ratio, rows.advantages, *clip)
        else:
            each = losses.importance_weighted_policy_gradient(log_probs, ratio, rows.advantages, cfg.ratio_cap)
            policy_loss = mean(each)
            is_clipped = ratio > (cfg.ratio_cap or np.inf)
        logs = {
            "policy_loss": policy_loss,
            "clip_fraction": mean(is_clipped),
            # What the policy that sampled was surprised by: the mean estimates its entropy.
            "entropy": -mean(sampled),
            "approx_kl": mean(losses.kl_k3(-jnp.log(ratio))),  # from the policy that sampled, Schulman 2020
        }
        loss = policy_loss
        if cfg.kl_cost > 0:
            log_reference = rows.reference
            if log_reference is None:
                log_reference = jax.lax.stop_gradient(self._log_probs(reference, rows.tokens, rows.temperature))
            logs["kl"] = mean(losses.kl_k3(losses.log_ratio(log_probs, log_reference, rows.mask)))
            loss += cfg.kl_cost * logs["kl"]
        return loss, {"loss": loss, **logs}

    def _preference_loss(self, params: Params, reference: Params, data: TokenBatch) -> tuple[jax.Array, Logs]:
        mask = data.mask[:, 1:]
        log_probs = self._log_probs(params, data.tokens)
        if data.ref_logprobs is None:
            log_reference = jax.lax.stop_gradient(self._log_probs(reference, data.tokens))
        else:
            log_reference = data.ref_logprobs[:, 1:]
        log_ratios = jnp.sum((log_probs - log_reference) * mask, axis=1)
        rewards = self.cfg.dpo_beta * log_ratios
        loss, accuracy = losses.preference_loss(rewards, data.scores, data.group)
        return loss, {"loss": loss, "preference_accuracy": accuracy}

    def _log_probs(self, params: Params, tokens: jax.Array, temperature: jax.Array | None = None) -> jax.Array:
        # Padding is on the right, where no real token attends to it: it needs no mask.
        options: dict[str, Any] = {"remat": self.cfg.remat, "chunk": self.cfg.logits_chunk}
        return transformer.token_log_probs(params, self.model_config, tokens, temperature=temperature, **options)

    def _learning_rate(self, steps: Any) -> jax.Array:
        """[] float32: of the update after `steps` updates."""
        risen = jnp.minimum((steps + 1) / (self.cfg.learning_rate_rise + 1), 1.0)
        return jnp.asarray(self.cfg.learning_rate * risen, jnp.float32)


def _weighted_sum(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(x * weights)


def _widened(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
