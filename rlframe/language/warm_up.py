"""Supervised warm-up of a language model: train on correct answers before reinforcement learning starts."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from rlframe.agents.grpo import GRPO
from rlframe.errors import NonFiniteLossError, UsageError
from rlframe.language.decoding.sampling import power_of_two
from rlframe.language.model.tokenizers import Tokenizer
from rlframe.learners import Learner, LearnerConfig
from rlframe.sharding import one_copy
from rlframe.trajectories.client.batches import pad
from rlframe.trajectories.client.groups import Group
from rlframe.trajectories.messages import IGNORED
from rlframe.types import Batch, Params

_SHORTEST = 16  # tokens; sequences are padded at least to this length


def warm_up(
    agent: GRPO,
    demonstrate: Callable[[random.Random, int], Sequence[tuple[str, str]]],
    tokenizer: Tokenizer,
    *,
    seed: int = 0,
    devices: int = 1,
    shard_params: bool = False,
    logger: Any = None,
    log_every: int = 10,
) -> Params:
    """Train with the cross-entropy loss. `supervised_steps` in the agent's config is the number of updates.

    To use the result, save it with `rlframe.language.model.weights.save` in the folder of the tokenizer, and set
    `GRPOConfig.weights` to this folder. GRPO then starts from these parameters, and also uses them as the reference.

    Args:
        agent: Agent with the model, the optimizer and the `supervised_*` settings.
        demonstrate: A function, for example `BaseEnv.demonstrations`. `demonstrate(source, count)` returns `count` new
            pairs (prompt, correct answer), which it draws at random with `source`, a `random.Random`.
        tokenizer: Tokenizer of the model. Its eos token is appended to each answer.
        seed: Seed of the initial parameters and of the demonstrations.
        devices: Number of devices that share each update.
        shard_params: See `LearnerConfig`.
        logger: An object with `write(step, values)`, to log `supervised_loss`. None logs nothing.
        log_every: Number of updates between two log rows.

    Returns:
        The parameters after the last update, on the first device, or as numpy arrays if `shard_params` is True.

    Raises:
        UsageError: The tokenizer has no eos token, or a demonstration is longer than `max_tokens`.
        NonFiniteLossError: The loss was NaN or infinite.
    """
    cfg = agent.cfg
    schedule = {"learning_rate": cfg.supervised_learning_rate, "total_learner_steps": cfg.supervised_steps or None}
    sft_agent = GRPO(dataclasses.replace(cfg, loss="sft", **schedule))
    learner = Learner(LearnerConfig(seed=seed, devices=devices, shard_params=shard_params), sft_agent, None)
    source = random.Random(seed)
    try:
        for step in range(1, cfg.supervised_steps + 1):
            pairs = demonstrate(source, cfg.supervised_batch_size)
            learner.step(demonstration_batch(tokenizer, pairs, cfg.max_tokens))
            if logger is not None and (step % log_every == 0 or step == cfg.supervised_steps):
                logger.write(step, {"supervised_loss": learner.wait_for_update()["loss"]})
        return jax.tree.map(one_copy, learner.state[0])
    except NonFiniteLossError as error:
        raise NonFiniteLossError(f"Supervised warm-up: {error}") from None
    finally:
        learner.close()


def demonstration_batch(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], max_tokens: int) -> Batch:
    """Make a batch from pairs (prompt, answer). A sequence is a prompt and its answer; only the answer is trained on.

    Raises:
        UsageError: The tokenizer has no eos token, or a sequence is longer than `max_tokens`.
    """
    if tokenizer.eos_token_id is None:
        raise UsageError("The tokenizer has no eos token, which must follow the answers of demonstrations.")
    prompts = [tokenizer.encode(prompt) for prompt, _ in pairs]
    rows = [
        [*prompt, *tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        for prompt, (_, answer) in zip(prompts, pairs)
    ]
    longest = max(rows, key=len)
    if len(longest) > max_tokens:
        raise UsageError(
            f"A demonstration has {len(longest)} tokens, more than GRPOConfig.max_tokens ({max_tokens}): "
            f"{pairs[rows.index(longest)]!r}."
        )
    masks = [[IGNORED] * len(prompt) + row[len(prompt) :] for prompt, row in zip(prompts, rows)]
    groups = [Group(tokens=[row], masks=[mask], scores=[0.0]) for row, mask in zip(rows, masks)]
    data, _ = pad(groups, [min(power_of_two(len(longest), _SHORTEST), max_tokens)])
    S = len(rows)
    return Batch(data, (), np.full(S, 1 / S, np.float32), np.full(S, -1, np.int64))
