"""GRPO (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300) trains a language model on groups of scored answers.

The same agent also supports plain policy gradient, DPO on preferences within groups, and supervised cross-entropy.
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
from rlframe.agents.schedules import Scheduled, check_schedules, clip_gradients, current, known_values, scheduled
from rlframe.agents.trees import zero_timestep
from rlframe.errors import UsageError, check_above, check_at_least
from rlframe.language.model import ModelConfig, transformer, weights
from rlframe.sharding import divide_rows
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
    """Defaults from Shao et al. 2024, section 4.2. Defaults that the paper does not state are from PPO.

    The update is compiled for each padded length of batches. `TrajectoryBuffer` pads to only a few lengths.
    """

    # model with random initial weights; ignored if `weights` is set
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    weights: Union[str, None] = None  # folder of a released model: config.json and model.safetensors
    # dtype of the weights; None uses the dtype of the model's config
    dtype: Literal["float32", "bfloat16", None] = None
    max_tokens: int = 1024  # maximum length of a sequence, including its prompt
    batch_size: int = 1024  # sequences per update
    loss: Literal["grpo", "policy_gradient", "dpo", "sft"] = "grpo"
    normalize_std: bool = True  # divide advantages by the standard deviation of their group; False: Dr. GRPO
    # how token losses are averaged: "sequence" (first within each sequence) or "token" (over all tokens, DAPO)
    average: Average = "sequence"
    # grpo: clip range of the ratio to the sampling policy, [1 - clip_epsilon, 1 + clip_epsilon]
    clip_epsilon: Scheduled = scheduled(0.2, above=0)
    # upper clip range, for DAPO's clip-higher (0.28); None uses clip_epsilon
    clip_epsilon_high: Union[Scheduled, None] = scheduled(None, above=0)
    # Upper limit of the ratio for data from much older parameters (Ye et al. 2020, arXiv:1912.09729).
    # grpo applies it where the advantage is negative, policy_gradient always. None means no limit.
    ratio_cap: Union[float, None] = 3.0
    # weight of the KL divergence to the reference: the initial parameters, or the batch's ref_logprobs; 0: no reference
    kl_cost: float = 0.04
    dpo_beta: float = 0.1  # dpo: beta; Rafailov et al. 2023, arXiv:2305.18290, appendix B
    learning_rate: Scheduled = scheduled(1e-6, above=0)  # Number or schedule, such as linear:3e-4:0.
    total_learner_steps: Union[int, None] = None  # Internal: number of updates in the run. Schedules end there.
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0  # AdamW weight decay, for matrices only (Loshchilov and Hutter 2019)
    max_grad_norm: Union[float, None] = 1.0
    micro_batch_size: Union[int, None] = None  # sequences per gradient computation; None uses the whole batch
    remat: bool = False  # recompute layers for the gradient to save memory
    logits_chunk: Union[int, None] = None  # positions of a sequence whose logits are in memory at once; None means all
    # for a bfloat16 model: the optimizer keeps a float32 copy, so that small updates are not lost
    master_weights: bool = True
    # Supervised warm-up before GRPO: `rlframe.language.warm_up`.
    supervised_steps: int = 0  # number of updates; 0 means no warm-up
    supervised_batch_size: int = 64  # demonstrations per update
    supervised_learning_rate: Scheduled = scheduled(1e-5, above=0)  # a schedule ends at supervised_steps

    def __post_init__(self) -> None:
        if self.weights is not None:  # make the path absolute, because an environment may change the working directory
            object.__setattr__(self, "weights", os.path.abspath(self.weights))
        check_at_least(self, 1, "max_tokens", "batch_size", "micro_batch_size", "logits_chunk", "supervised_batch_size")
        check_at_least(self, 1, "total_learner_steps")
        check_above(self, 0, "max_grad_norm", "ratio_cap", "dpo_beta")
        check_at_least(self, 0, "kl_cost", "weight_decay", "supervised_steps")
        check_schedules(self)
        if any(value >= 1.0 for value in known_values(self, "clip_epsilon")):
            raise UsageError(f"GRPOConfig.clip_epsilon must be below 1, got {self.clip_epsilon}.")
        if self.loss == "dpo" and self.micro_batch_size is not None:
            raise UsageError(
                "GRPOConfig.micro_batch_size must be None for the loss dpo, because its pairs need the whole batch."
            )

    @property
    def has_reference(self) -> bool:
        """True if the loss compares the policy with reference parameters."""
        return self.loss == "dpo" or (self.loss != "sft" and self.kl_cost > 0)

    @property
    def model_config(self) -> ModelConfig:
        """The config of the model: `model` or the config in the folder `weights`, with `dtype`.

        Raises:
            CheckpointError: the folder or its `config.json` does not exist.
            UsageError: the model's architecture is not implemented.
        """
        if self.weights is not None:
            return weights.read_config(self.weights, dtype=self.dtype)
        return dataclasses.replace(self.model, dtype=self.dtype) if self.dtype else self.model


class KeyValueState(NamedTuple):
    """The recurrent state of B sequences."""

    cache: transformer.Cache  # keys and values of the tokens so far
    lengths: Any  # [B] int32: number of tokens so far


class OptimizerState(NamedTuple):
    inner: Any  # state of the optax optimizer
    master: Any  # float32 copy of the parameters if the model's dtype is narrower, otherwise ()


class GRPOState(NamedTuple):
    """A `LearnerState` with the reference parameters."""

    opt_state: OptimizerState
    steps: Any
    rng: Any
    reference_params: Params  # initial parameters; () if the loss uses no reference


class _Rows(NamedTuple):
    """Inputs of the loss for S sequences. The `[S, T]` arrays have no entry for the first token of a sequence."""

    tokens: Any  # [S, T + 1]
    mask: Any  # [S, T]
    weights: Any  # [S, T]: weight of each token in means over the batch
    advantages: Any  # [S, T]
    temperature: Any  # [S]: sampling temperature; None means 1
    sampled: Any  # [S, T]: log-probabilities under the sampling policy; None if this is the current policy
    reference: Any  # [S, T]: log-probabilities under the reference; if None, the loss computes them


class GRPO(Agent):
    """Trains a language model on `TokenBatch`es from a `TrajectoryBuffer`.

    If a group has no token-level advantages, its normalized scores are its advantages. The
    losses `grpo` and `policy_gradient` compute log-probabilities at the batch's `temperature`.

    Each actor step adds one token. The observation is the last token (of the prompt, or the previous action), and the
    action is the next token. A sequence must fit into `max_tokens`. (`rlframe.language.DecodeEngine` decodes many
    sequences faster.)

    `initial_params` are random, or loaded from the folder `cfg.weights`. The folder must exist wherever the agent is
    used.

    Args:
        cfg: see `GRPOConfig`.
        observation_spec: None, or the spec of the model's tokens.
        action_spec: None, or the spec of the model's tokens.
        net_factory: must be None. The network is the model.
        policy_factory: must be None.

    Raises:
        UsageError: the specs do not match the model's tokens, or `max_tokens` exceeds the model's limit.
        CheckpointError: the folder does not exist or contains no model.
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
            raise UsageError("GRPO takes no network. GRPOConfig.model or .weights defines the model.")
        self.model_config = cfg.model_config
        if cfg.max_tokens > self.model_config.max_position_embeddings:
            raise UsageError(
                f"GRPOConfig.max_tokens is {cfg.max_tokens}, but the model's max_position_embeddings are "
                f"{self.model_config.max_position_embeddings}."
            )
        token = specs.DiscreteArray(self.model_config.vocab_size, np.int32, "token")
        for name, spec in (("observation_spec", observation_spec), ("action_spec", action_spec)):
            if spec is not None and spec != token:
                raise UsageError(f"GRPO's {name} must be the spec of a token of its model, {token}; got {spec}.")
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
        """Return (logits `[B, V]` of the token after the observed one, state that includes the observed token)."""
        tokens = jnp.asarray(timestep.observation)[:, None]
        logits, cache = transformer.apply_cached(params, self.model_config, tokens, state.cache, state.lengths)
        return logits[:, 0], KeyValueState(cache, state.lengths + 1)

    def _act_on_zeros(self) -> tuple[AgentOutput, AgentState]:
        # Trace with random weights, so that the weights are not read from the folder.
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
            functools.partial(current, cfg, "learning_rate"),
            cfg.adam_b1,
            cfg.adam_b2,
            cfg.adam_epsilon,
            weight_decay=cfg.weight_decay,
            mask=functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1),
        )
        return clip_gradients(cfg.max_grad_norm, adam)

    def initial_learner_state(self, params: Params) -> GRPOState:
        master = _widened(params) if self.cfg.master_weights and self.model_config.dtype != "float32" else ()
        opt_state = OptimizerState(self.optimizer.init(master or params), master)
        reference = params if self.cfg.has_reference else ()
        return GRPOState(opt_state, jnp.zeros((), jnp.int32), jax.random.PRNGKey(0), reference)

    def loss(self, params: Params, learner_state: GRPOState, batch: Batch) -> tuple[jax.Array, Logs]:
        if self.cfg.loss == "dpo":
            return self._preference_loss(params, learner_state.reference_params, batch.data)
        return self._loss_of_rows(params, learner_state, self._rows(batch.data))

    def compute_gradients(self, params: Params, learner_state: GRPOState, batch: Batch) -> tuple[Logs, Params]:
        S, size = len(batch.data.tokens), self.cfg.micro_batch_size
        if size is None or size >= S:
            logs, grads = super().compute_gradients(params, learner_state, batch)
        else:
            logs, grads = self._accumulate(params, learner_state, self._rows(batch.data), size)
        data = batch.data
        logs |= {
            # Divide before summing, because a sum of very large scores could overflow.
            "reward": jnp.sum(data.scores / S),
            "length": jnp.sum(data.mask) / S,  # mean number of sampled tokens per sequence
            "tokens": jnp.sum(data.lengths),  # tokens in the batch, without padding
            "grad_norm": optax.global_norm(grads),
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

    def _accumulate(self, params: Params, state: GRPOState, rows: _Rows, size: int) -> tuple[Logs, Params]:
        """Return the same result as `compute_gradients`, computed for `size` sequences at a time.

        Losses and logs are sums over sequences, so the results of the parts can be added.
        """
        num_padding = -len(rows.tokens) % size
        parts = jax.tree.map(
            lambda x: jnp.pad(x, ((0, num_padding), *[(0, 0)] * (x.ndim - 1))).reshape(-1, size, *x.shape[1:]), rows
        )
        gradient = jax.value_and_grad(self._loss_of_rows, has_aux=True)

        def add(total: Any, part: _Rows) -> tuple[Any, None]:
            (_, logs), grads = gradient(params, state, divide_rows(part))
            return jax.tree.map(jnp.add, total, (logs, _widened(grads))), None

        first = jax.tree.map(lambda x: x[0], parts)
        shapes = jax.eval_shape(lambda: self._loss_of_rows(params, state, first)[1])
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

    def _loss_of_rows(self, params: Params, state: GRPOState, rows: _Rows) -> tuple[jax.Array, Logs]:
        """Return the loss and logs, as weighted sums over tokens. The weights of a whole batch sum to 1."""
        cfg, mean = self.cfg, functools.partial(_weighted_sum, weights=rows.weights)
        if cfg.loss == "sft":
            loss = -mean(self._log_probs(params, rows.tokens))
            return loss, {"loss": loss}
        log_probs = self._log_probs(params, rows.tokens, rows.temperature)
        sampled = jax.lax.stop_gradient(log_probs) if rows.sampled is None else rows.sampled
        ratio = jnp.exp(losses.log_ratio(log_probs, sampled, rows.mask))
        if cfg.loss == "grpo":
            high = "clip_epsilon" if cfg.clip_epsilon_high is None else "clip_epsilon_high"
            clip = current(cfg, "clip_epsilon", state.steps), current(cfg, high, state.steps)
            policy_loss = mean(losses.clipped_surrogate(ratio, rows.advantages, *clip, cfg.ratio_cap))
            is_clipped = losses.is_clipped(ratio, rows.advantages, *clip)
        else:
            each = losses.importance_weighted_policy_gradient(log_probs, ratio, rows.advantages, cfg.ratio_cap)
            policy_loss = mean(each)
            is_clipped = ratio > (cfg.ratio_cap or np.inf)
        logs = {
            "policy_loss": policy_loss,
            "clip_fraction": mean(is_clipped),
            # The mean negative log-probability under the sampling policy estimates the entropy of this policy.
            "entropy": -mean(sampled),
            "approx_kl": mean(losses.kl_k3(-jnp.log(ratio))),  # KL to the sampling policy (Schulman 2020)
        }
        loss = policy_loss
        if cfg.kl_cost > 0:
            log_reference = rows.reference
            if log_reference is None:
                log_reference = self._log_probs(state.reference_params, rows.tokens, rows.temperature)
                log_reference = jax.lax.stop_gradient(log_reference)
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
        # Padding is on the right. No token of a sequence attends to padding, so no attention mask is needed.
        options: dict[str, Any] = {"remat": self.cfg.remat, "chunk": self.cfg.logits_chunk}
        return transformer.token_log_probs(params, self.model_config, tokens, temperature=temperature, **options)


def _weighted_sum(x: jax.Array, weights: jax.Array) -> jax.Array:
    return jnp.sum(x * weights)


def _widened(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
