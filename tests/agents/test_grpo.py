"""Tests of GRPO: a comparison of the loss with a brute-force computation, masks, memory options, and acting."""

from __future__ import annotations

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents import GRPO, GRPOConfig
from rlframe.errors import CheckpointError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.language import ModelConfig
from rlframe.language.model import transformer, weights
from rlframe.trajectories import Group
from rlframe.trajectories.client.batches import pad
from rlframe.types import FIRST, MID, Sequence, TimeStep, specs
from tests.agents.batches import assert_trees_equal, gradients, learn, started
from tests.agents.token_batches import token_batch

MODEL = ModelConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
)
CONFIG = GRPOConfig(MODEL, max_tokens=9, batch_size=5, learning_rate=1e-2)
BATCH = token_batch(11, lengths=[9, 4, 6, 7, 5], group=[0, 0, 0, 1, 1])


forward = jax.jit(transformer.apply, static_argnums=1)


@functools.cache
def make(**changes) -> GRPO:
    return GRPO(dataclasses.replace(CONFIG, **changes))


def other_params(seed=5):
    """Return different parameters than the initial parameters, with confident predictions, so that ratios are not 1."""
    params = make().initial_params(jax.random.PRNGKey(seed))
    return {**params, "embed_tokens": 20 * params["embed_tokens"]}


def log_probs_of(params, tokens, temperature=1.0):
    """Return [S, T - 1] float64: log-probabilities of all tokens except the first, computed in a loop."""
    logits = np.asarray(forward(params, MODEL, tokens), np.float64)
    logits /= np.broadcast_to(temperature, len(tokens))[:, None, None]
    found = np.zeros((len(tokens), tokens.shape[1] - 1))
    for s, t in np.ndindex(found.shape):
        row = logits[s, t]
        found[s, t] = row[tokens[s, t + 1]] - np.log(np.sum(np.exp(row)))
    return found


def brute_force_loss(params, data, advantages, *, average, clip, cap, kl_cost, log_reference):
    """Compute DeepSeekMath's equation 3 with loops. Return (loss, policy loss, KL, fraction of clipped tokens)."""
    log_probs = log_probs_of(params, data.tokens, 1.0 if data.temperature is None else data.temperature)
    S, T = data.tokens.shape
    policy, kl, clipped = (np.zeros((S, T)) for _ in range(3))
    for s, t in np.argwhere(data.mask):
        A, ratio = advantages[s, t], np.exp(log_probs[s, t - 1] - data.inference_logprobs[s, t])
        if A < 0:
            ratio = min(ratio, cap)
        clipped_ratio = min(max(ratio, 1 - clip[0]), 1 + clip[1])
        policy[s, t] = -min(ratio * A, clipped_ratio * A)
        clipped[s, t] = (A > 0 and ratio > clipped_ratio) or (A < 0 and ratio < clipped_ratio)
        difference = log_reference[s, t - 1] - log_probs[s, t - 1]
        kl[s, t] = np.exp(difference) - difference - 1

    def mean(x):
        rows = [[x[s, t] for t in range(T) if data.mask[s, t]] for s in range(S)]
        return np.mean(np.concatenate(rows)) if average == "token" else np.mean([np.mean(row) for row in rows])

    return mean(policy) + kl_cost * mean(kl), mean(policy), mean(kl), mean(clipped)


@pytest.mark.parametrize(
    ("average", "given"),
    [
        ("token", True),
        pytest.param("sequence", False, marks=pytest.mark.system),
        pytest.param("sequence", True, marks=pytest.mark.system),
        pytest.param("token", False, marks=pytest.mark.system),
    ],
)
def test_loss_matches_the_equation_of_the_paper(average, given):
    """If `given` is True, one group has token-level advantages. The loss normalizes the scores of the other group."""
    agent = make(average=average, clip_epsilon_high=0.28, kl_cost=0.3)
    data = BATCH.data
    advantages = np.zeros(data.mask.shape)
    for group in (0, 1):
        rows = data.group == group
        scores = data.scores[rows].astype(np.float64)
        advantages[rows] = ((scores - scores.mean()) / scores.std())[:, None]
    if given:
        data = data._replace(
            advantages=np.where((data.group == 1)[:, None], np.sin(np.arange(9)), 7.0).astype(np.float32) * data.mask,
            has_advantages=data.group == 1,
        )
        advantages[data.group == 1] = np.sin(np.arange(9))
    params, state = other_params(), started(agent)[1]
    loss, policy_loss, kl, clipped = brute_force_loss(
        params,
        data,
        advantages,
        average=average,
        clip=(0.2, 0.28),
        cap=3.0,
        kl_cost=0.3,
        log_reference=log_probs_of(state.reference_params, data.tokens),
    )
    found, logs = jax.jit(agent.loss)(params, state, BATCH._replace(data=data))
    assert 0 < clipped < 1 and kl > 0.01
    np.testing.assert_allclose(found, loss, rtol=1e-4)
    np.testing.assert_allclose(logs["policy_loss"], policy_loss, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(logs["kl"], kl, rtol=1e-4)
    np.testing.assert_allclose(logs["clip_fraction"], clipped, rtol=1e-5)


@pytest.mark.system
def test_loss_uses_the_temperature_of_each_sequence():
    """Logits are divided by the temperature. Values of 0 or less count as 1, also with chunked logits."""
    temperature = np.float32([0.5, 1.0, 2.0, 0.0, -1.0])
    data, effective = BATCH.data._replace(temperature=temperature), np.float32([0.5, 1.0, 2.0, 1.0, 1.0])
    params, state = other_params(), started(make())[1]
    advantages = np.zeros(data.mask.shape)
    for group in (0, 1):
        scores = data.scores[data.group == group].astype(np.float64)
        advantages[data.group == group] = ((scores - scores.mean()) / scores.std())[:, None]
    expected = brute_force_loss(
        params,
        data._replace(temperature=effective),
        advantages,
        average="sequence",
        clip=(0.2, 0.2),
        cap=3.0,
        kl_cost=0.3,
        log_reference=log_probs_of(state.reference_params, data.tokens, effective),
    )
    for changes in ({}, {"logits_chunk": 3}):
        found, logs = jax.jit(make(kl_cost=0.3, **changes).loss)(params, state, BATCH._replace(data=data))
        np.testing.assert_allclose([found, logs["policy_loss"], logs["kl"]], expected[:3], rtol=1e-4, atol=1e-6)
    assert abs(found - jax.jit(make(kl_cost=0.3).loss)(params, state, BATCH)[0]) > 1e-3
    whole, parts = (
        gradients(make(**changes), params, state, BATCH._replace(data=data))
        for changes in ({}, {"micro_batch_size": 2})
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), whole, parts)


@pytest.mark.system
def test_ratio_is_one_for_tokens_that_the_current_policy_sampled_at_the_batch_temperature():
    params, state = other_params(), started(make())[1]
    temperature = np.full(5, 0.5, np.float32)
    sampled = np.pad(log_probs_of(params, BATCH.data.tokens, temperature), ((0, 0), (1, 0))) * BATCH.data.mask
    data = BATCH.data._replace(temperature=temperature, inference_logprobs=sampled.astype(np.float32))
    logs = make().loss(params, state, BATCH._replace(data=data))[1]
    assert logs["clip_fraction"] == 0 and abs(logs["approx_kl"]) < 1e-6
    other = make().loss(params, state, BATCH._replace(data=data._replace(temperature=None)))[1]
    assert other["approx_kl"] > 0.01


def test_advantage_that_is_set_to_zero_does_not_change_the_advantages_of_other_sequences():
    """All scores are normalized before some advantages are set to 0, as in atroposlib's trainer."""
    tokens = [[1, 2, 3], [1, 4, 5, 6], [1, 7], [1, 8, 9]]
    masks = [[-100, *row[1:]] for row in tokens]
    overrides = [{}, {"set_advantage_to_zero": True}, {"set_advantage_to_zero": False}, {}]
    data, _ = pad([Group(tokens, masks, [1.0, 0.0, 0.0, 2.0], overrides=overrides)], [4])
    advantages = np.asarray(GRPO(CONFIG)._rows(data).advantages)
    relative = np.array([1.0, 0.0, 0.0, 2.0]) - 0.75
    relative /= np.std([1.0, 0.0, 0.0, 2.0]) + 1e-6
    relative[1] = 0
    np.testing.assert_allclose(advantages, relative[:, None] * data.mask[:, 1:], rtol=1e-5)


@pytest.mark.system
@pytest.mark.parametrize(
    "loss", ["grpo", *(pytest.param(one, marks=pytest.mark.system) for one in ("policy_gradient", "dpo"))]
)
@pytest.mark.parametrize("normalize_std", [True, pytest.param(False, marks=pytest.mark.system)])
def test_extreme_scores_and_advantages_give_finite_parameters(loss, normalize_std):
    agent = GRPO(dataclasses.replace(CONFIG, loss=loss, normalize_std=normalize_std))
    params, state = started(agent)
    largest = np.float32(3e38)
    scores = np.float32([largest, -largest, largest, 0, largest])
    batch = token_batch(MODEL.vocab_size, [9, 5, 7, 4, 3], [0, 0, 0, 1, 1], scores=scores)
    advantages = scores[:, None] * batch.data.mask
    given = batch._replace(data=batch.data._replace(has_advantages=np.ones(5, bool), advantages=advantages))
    for one in (batch, given, batch):
        params, state, logs = agent.learner_step(params, state, one)
        assert all(np.isfinite(value) for value in logs.values())
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, state.opt_state)))


def test_reference_log_probabilities_of_the_batch_are_used():
    agent = make(kl_cost=0.3)
    params, state = other_params(), started(agent)[1]
    reference = np.pad(log_probs_of(state.reference_params, BATCH.data.tokens), ((0, 0), (1, 0))) * BATCH.data.mask
    batch = BATCH._replace(data=BATCH.data._replace(ref_logprobs=reference.astype(np.float32)))
    expected = agent.loss(params, state, BATCH)[0]
    np.testing.assert_allclose(agent.loss(params, state._replace(reference_params=None), batch)[0], expected, rtol=1e-5)


@pytest.mark.system
def test_on_policy_gradient_equals_the_reinforce_gradient():
    """Test correct and missing sampling log-probabilities, several clip ranges, and the loss policy_gradient."""
    params, state = started(make(kl_cost=0.0))
    log_probs = np.pad(log_probs_of(params, BATCH.data.tokens), ((0, 0), (1, 0))) * BATCH.data.mask
    with_log_probs = BATCH._replace(data=BATCH.data._replace(inference_logprobs=log_probs.astype(np.float32)))
    without_log_probs = BATCH._replace(data=BATCH.data._replace(inference_logprobs=None))
    cases = [
        ({}, with_log_probs),
        ({}, without_log_probs),
        ({"loss": "policy_gradient"}, with_log_probs),
        ({"clip_epsilon": 0.01}, without_log_probs),
    ]
    first, *others = [gradients(make(kl_cost=0.0, **changes), params, state, batch) for changes, batch in cases]
    for other in others:
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), first, other)
    assert optax_norm(first) > 1e-3


def optax_norm(tree):
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


@pytest.mark.system
def test_masked_tokens_and_padding_do_not_change_the_gradient():
    agent = make()
    params, state = other_params(), started(agent)[1]
    data = BATCH.data
    expected, grads = agent.compute_gradients(params, state, BATCH)
    after = np.arange(9) >= data.lengths[:, None]
    hidden = data.mask == 0
    changed = data._replace(
        tokens=np.where(after, 3, data.tokens).astype(np.int32),
        inference_logprobs=np.where(hidden, -700.0, data.inference_logprobs).astype(np.float32),
        advantages=np.where(hidden, 50.0, data.advantages).astype(np.float32),
    )
    logs, others = agent.compute_gradients(params, state, BATCH._replace(data=changed))
    np.testing.assert_allclose(logs["loss"], expected["loss"], rtol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), grads, others)


@pytest.mark.system
def test_additional_padding_does_not_change_the_update():
    agent = make()
    params, state = started(agent)
    data = BATCH.data
    wide = {
        name: np.pad(value, ((0, 0), (0, 3)))
        for name, value in data._asdict().items()
        if value is not None and value.ndim == 2
    }
    one, other = (learn(agent, params, state, batch) for batch in (BATCH, BATCH._replace(data=data._replace(**wide))))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-3, atol=1e-5), one[0], other[0])


@pytest.mark.system
@pytest.mark.parametrize("changes", [{}, {"loss": "policy_gradient"}, {"loss": "sft"}, {"average": "token"}])
def test_micro_batches_give_the_gradient_and_logs_of_the_whole_batch(changes):
    params, state = other_params(), started(make())[1]
    expected, grads = make(**changes).compute_gradients(params, state, BATCH)
    logs, accumulated = make(**changes, micro_batch_size=2).compute_gradients(
        params, state, BATCH
    )  # 2 + 2 + 1 sequences
    assert logs.keys() == expected.keys()
    for name in logs:
        np.testing.assert_allclose(logs[name], expected[name], rtol=1e-4, atol=1e-6, err_msg=name)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), grads, accumulated)


@pytest.mark.system
def test_memory_saving_options_give_the_same_gradient():
    params, state = other_params(), started(make())[1]
    grads, others = (
        make(**changes).compute_gradients(params, state, BATCH)[1]
        for changes in ({}, {"remat": True, "logits_chunk": 3})
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), grads, others)


def test_dpo_loss_matches_the_definition_as_a_mean_over_pairs():
    agent = make(loss="dpo", dpo_beta=0.5)
    params, state = other_params(), started(agent)[1]
    data = BATCH.data
    ratios = np.sum(
        (log_probs_of(params, data.tokens) - log_probs_of(state.reference_params, data.tokens)) * data.mask[:, 1:], 1
    )
    margins = [
        0.5 * (ratios[i] - ratios[j])
        for i, j in np.ndindex(5, 5)
        if data.group[i] == data.group[j] and data.scores[i] > data.scores[j]
    ]
    loss, logs = agent.loss(params, state, BATCH)
    np.testing.assert_allclose(loss, np.mean(np.log1p(np.exp(-np.array(margins)))), rtol=1e-4)
    np.testing.assert_allclose(logs["preference_accuracy"], np.mean(np.array(margins) > 0), rtol=1e-5)
    np.testing.assert_allclose(agent.loss(state.reference_params, state, BATCH)[0], np.log(2), rtol=1e-5)


@pytest.mark.parametrize("average", ["sequence", "token"])
def test_supervised_loss_is_cross_entropy(average):
    params, state = started(make(loss="sft"))
    log_probs, mask = log_probs_of(params, BATCH.data.tokens), BATCH.data.mask[:, 1:]
    expected = -np.sum(log_probs * mask) / np.sum(mask)
    if average == "sequence":
        expected = -np.mean(np.sum(log_probs * mask, axis=1) / np.sum(mask, axis=1))
    np.testing.assert_allclose(make(loss="sft", average=average).loss(params, state, BATCH)[0], expected, rtol=1e-5)
    assert state.reference_params == ()


@pytest.mark.system
@pytest.mark.parametrize("loss", ["grpo", "policy_gradient", "dpo", "sft"])
def test_each_loss_increases_the_probability_of_sequences_with_high_scores(loss):
    agent = make(loss=loss, kl_cost=0.0, learning_rate=3e-3)
    batch = BATCH._replace(data=BATCH.data._replace(inference_logprobs=None))
    params, state = started(agent)
    step = jax.jit(agent.learner_step)
    # Compare the best and the worst sequence of the first group, which has three sequences.
    best, worst = np.argmax(batch.data.scores[:3]), np.argmin(batch.data.scores[:3])

    def margin(params):
        sums = np.sum(log_probs_of(params, batch.data.tokens) * batch.data.mask[:, 1:], axis=1)
        return sums[best] - sums[worst] if loss != "sft" else np.sum(sums)

    before = margin(params)
    for _ in range(10):
        params, state, _ = step(params, state, batch)
    assert margin(params) > before + 1.0
    assert state.steps == 10


@pytest.mark.system
def test_logs_contain_statistics_of_the_batch():
    agent = make(learning_rate="linear:2.5e-3:1e-2@3")
    _, _, logs = learn(agent, *started(agent), BATCH)
    np.testing.assert_allclose(logs["reward"], BATCH.data.scores.mean(), rtol=1e-6)
    np.testing.assert_allclose(logs["length"], np.mean([7, 2, 4, 5, 3]), rtol=1e-6)
    assert logs["tokens"] == 31
    np.testing.assert_allclose(logs["learning_rate"], 1e-2 / 4)
    mask = BATCH.data.mask[:, 1:]
    surprise = -np.sum(BATCH.data.inference_logprobs[:, 1:] * mask, axis=1) / np.sum(mask, axis=1)
    np.testing.assert_allclose(logs["entropy"], surprise.mean(), rtol=1e-5)


@pytest.mark.system
def test_small_updates_of_bfloat16_weights_reach_the_float32_copy():
    small = dict(dtype="bfloat16", learning_rate=1e-5, kl_cost=0.0)
    kept, lost = make(**small), make(**small, master_weights=False)
    params, state = started(kept)
    assert params["layers"][0]["q_proj"].dtype == jnp.bfloat16
    assert lost.initial_learner_state(params).opt_state.master == ()
    before = state.opt_state.master
    assert_trees_equal(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params), before)
    step = jax.jit(kept.learner_step)
    for _ in range(3):
        params, state, _ = step(params, state, BATCH)
    master = state.opt_state.master
    moved = np.abs(master["layers"][0]["q_proj"] - before["layers"][0]["q_proj"])
    np.testing.assert_allclose(moved.max(), 3e-5, rtol=0.1)  # three updates, each as large as the learning rate
    assert_trees_equal(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), master), params)


# --- acting


def token_steps(tokens, first):
    B = len(tokens)
    step_type = np.full(B, FIRST if first else MID, np.uint8)
    return TimeStep(step_type, np.zeros(B, np.float32), np.ones(B, np.float32), np.asarray(tokens, np.int32))


def test_acting_samples_tokens_conditioned_on_all_previous_tokens():
    agent = make()
    params = other_params()
    state, step = agent.initial_state(3), jax.jit(agent.actor_step)
    seen, log_probs = [np.array([1, 2, 3], np.int32)], []
    for t in range(6):
        output, state = step(jax.random.PRNGKey(t), params, token_steps(seen[-1], t == 0), state)
        seen.append(np.asarray(output.action))
        log_probs.append(np.asarray(output.extras["log_prob"]))
    tokens = np.stack(seen, axis=1)
    np.testing.assert_allclose(np.stack(log_probs, axis=1), log_probs_of(params, tokens), rtol=1e-4)
    np.testing.assert_array_equal(state.lengths, [6, 6, 6])
    greedy, _ = jax.jit(agent.eval_step)(
        jax.random.PRNGKey(0), params, token_steps(seen[0], True), agent.initial_state(3)
    )
    np.testing.assert_array_equal(greedy.action, np.argmax(forward(params, MODEL, tokens[:, :1])[:, 0], axis=-1))


@pytest.mark.system
def test_tokens_are_sampled_from_the_distribution_of_the_model():
    agent = make()
    params = other_params()
    B = 4000
    output, _ = agent.actor_step(jax.random.PRNGKey(0), params, token_steps([4] * B, True), agent.initial_state(B))
    expected = np.asarray(jax.nn.softmax(transformer.apply(params, MODEL, jnp.array([[4]]))[0, 0]))
    np.testing.assert_allclose(np.bincount(output.action, minlength=11) / B, expected, atol=0.03)


def test_inferencer_resets_the_recurrent_state_when_an_episode_starts():
    agent = make()
    params = other_params()
    inferencer = Inferencer(InferencerConfig(), agent, Published(params))
    env_ids = np.arange(2)
    one, state = inferencer.inference(env_ids, token_steps([1, 2], True), agent.initial_state(2))
    _, state = inferencer.inference(env_ids, token_steps([5, 6], False), state)
    np.testing.assert_array_equal(state.lengths, [2, 2])
    again, state = inferencer.inference(env_ids, token_steps([1, 2], True), jax.tree.map(np.zeros_like, state))
    np.testing.assert_array_equal(state.lengths, [1, 1])
    assert one.action.shape == again.action.shape == (2,)


class Published:
    """A replacement for a learner, with a single version of parameters."""

    def __init__(self, params):
        self._params = jax.tree.map(np.asarray, params)

    def get_params(self, known_version=-1):
        return 0, (None if known_version == 0 else self._params)


def test_observation_and_action_specs_are_specs_of_tokens():
    agent = make()
    token = specs.DiscreteArray(11, np.int32, "token")
    assert agent.step_spec.observation == agent.step_spec.action == token
    assert agent.step_spec.agent_state.cache.keys[0].shape == (2, 9, 4)
    assert (agent.replay_spec.kind, agent.replay_spec.item, agent.replay_spec.batch_size) == ("queue", Sequence(9), 5)
    assert GRPO(CONFIG, token, token).action_spec == token
    with pytest.raises(UsageError, match="observation_spec must be the spec of a token of its model"):
        GRPO(CONFIG, specs.DiscreteArray(12, np.int32, "token"))


# --- weights from a folder


def test_initial_weights_are_loaded_from_a_folder_and_not_pickled(tmp_path):
    params = other_params()
    weights.save(tmp_path, MODEL, params)
    agent = GRPO(dataclasses.replace(CONFIG, model=ModelConfig(), weights=str(tmp_path)))
    pickled = pickle.dumps(agent)
    assert len(pickled) < 2000
    assert_trees_equal(pickle.loads(pickled).initial_params(jax.random.PRNGKey(0)), params)
    assert agent.model_config == MODEL
    narrow = GRPO(dataclasses.replace(agent.cfg, dtype="bfloat16"))
    assert narrow.initial_params(jax.random.PRNGKey(0))["norm"].dtype == jnp.bfloat16
    (tmp_path / "model.safetensors").unlink()
    assert agent.step_spec.action.num_values == 11  # `step_spec` does not read the weights
    with pytest.raises(CheckpointError, match="neither model.safetensors"):
        agent.initial_params(jax.random.PRNGKey(0))


def test_missing_weights_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere"):
        make(weights=str(tmp_path / "nowhere"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 0}, "micro_batch_size must be at least 1"),
        ({"learning_rate": float("nan")}, "learning_rate must be above 0"),
        ({"kl_cost": -0.1}, "kl_cost must be at least 0"),
        ({"clip_epsilon": 1.0}, "clip_epsilon must be below 1"),
        ({"loss": "dpo", "micro_batch_size": 2}, "pairs need the whole batch"),
        ({"max_tokens": 17}, "max_position_embeddings are 16"),
    ],
)
def test_invalid_options_are_rejected(changes, message):
    with pytest.raises(UsageError, match=message):
        make(**changes)


def test_net_factory_is_rejected():
    with pytest.raises(UsageError, match=r"GRPOConfig.model or .weights"):
        GRPO(CONFIG, net_factory=lambda *_: None)
