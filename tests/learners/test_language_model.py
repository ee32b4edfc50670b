"""Tests of a Learner that trains a language model with GRPO. Its batches come from the trajectory service."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import uuid

import jax
import numpy as np
import pytest

from rlframe.agents import GRPO, GRPOConfig
from rlframe.errors import NonFiniteLossError
from rlframe.language import ModelConfig, SamplingParams, generate
from rlframe.learners import Learner, LearnerConfig
from rlframe.replay import ReplayBuffer
from rlframe.trajectories import Group, TrajectoryBuffer, TrajectoryClient
from tests.agents.batches import assert_trees_equal
from tests.agents.token_batches import token_batch
from tests.trajectories.serving import DEADLINE, running_service

BEST = 3  # id of the token that gets a reward
MODEL = ModelConfig(
    vocab_size=8,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    max_position_embeddings=128,
)
CONFIG = GRPOConfig(MODEL, max_tokens=128, batch_size=16, learning_rate=1e-2, kl_cost=0.01)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with running_service(tmp_path_factory.mktemp("service")) as service:
        yield service.url


@pytest.fixture
def run():
    return uuid.uuid4().hex


@pytest.fixture
def client(url, run):
    with TrajectoryClient(url, run=run, timeout=DEADLINE) as client:
        client.register(batch_size=16, max_token_len=128, num_steps=100)
        yield client


def answers(params, version: int, prompt: int = 2) -> list[Group]:
    """Return two groups of eight sampled answers. The score of an answer is the fraction of BEST tokens."""
    prompts = [[group + 1] * prompt for group in range(2) for _ in range(8)]
    params = jax.tree.map(np.asarray, params)
    samples = generate(params, MODEL, prompts, version, SamplingParams(max_tokens=6))
    groups = []
    for i in (0, 8):
        group_samples = samples[i : i + 8]
        groups.append(
            Group(
                tokens=[[*prompts[i], *one.tokens] for one in group_samples],
                masks=[[-100] * prompt + one.tokens for one in group_samples],
                scores=[float(np.mean(np.array(one.tokens) == BEST)) for one in group_samples],
                inference_logprobs=[[1.0] * prompt + one.log_probs for one in group_samples],
                policy_version=version,
            )
        )
    return groups


@pytest.mark.system
def test_policy_learns_the_rewarded_token_and_resumes_from_a_checkpoint(url, run, client, tmp_path):
    buffer = TrajectoryBuffer(url, run=run, timeout=DEADLINE)
    config = LearnerConfig(checkpoint_dir=str(tmp_path), seed=4)
    learner = Learner(config, GRPO(CONFIG), buffer)
    rewards = []
    for _ in range(30):
        version, params = learner.get_params()
        client.post(answers(params, version))
        logs = learner.step(buffer.wait_for_batch(DEADLINE))
        rewards.append(float(logs["reward"]))
        assert (logs["staleness"], logs["tokens"], logs["length"]) == (0, 16 * 8, 6)
        assert abs(float(logs["approx_kl"])) < 1e-5  # learner and sampler compute equal log-probabilities
    assert np.mean(rewards[:3]) < 0.3 and np.mean(rewards[-3:]) > 0.9
    assert logs["kl"] > 0.1 and learner.learner_steps == 30
    learner.save()
    version, params = learner.get_params()
    client.post(answers(params, version))
    batch = buffer.wait_for_batch(DEADLINE)
    after = learner.step(batch)

    resumed = Learner(dataclasses.replace(config, resume=True, seed=5), GRPO(CONFIG), buffer)
    assert resumed.learner_steps == 30 and resumed.params_version > version
    assert_trees_equal(resumed.get_params()[1], params)
    again = resumed.step(batch)
    for name in ("loss", "kl", "grad_norm"):  # depend on the restored reference and optimizer state
        np.testing.assert_allclose(again[name], after[name], rtol=1e-5, err_msg=name)
    assert_trees_equal(resumed.get_params()[1], learner.get_params()[1])
    for each in (learner, resumed, buffer):
        each.close()


class CountingGRPO(GRPO):
    """GRPO that records the shape of the batch whenever JAX traces the update."""

    traced: list[tuple[int, ...]] = []  # noqa: RUF012

    def learner_step(self, params, learner_state, batch):
        self.traced.append(batch.data.tokens.shape)
        return super().learner_step(params, learner_state, batch)


@pytest.mark.system
def test_extreme_scores_give_the_same_update_as_scores_of_one_and_zero(url, run, client):
    def learned(best, other):
        agent = GRPO(dataclasses.replace(CONFIG, loss="policy_gradient"))
        with contextlib.closing(TrajectoryBuffer(url, run=run, timeout=DEADLINE)) as buffer:
            learner = Learner(LearnerConfig(), agent, buffer)
            tokens = [[1, BEST, BEST]] * 8 + [[1, 2, 2]] * 8
            scores = [best] * 8 + [other] * 8
            client.post(Group(tokens, [[-100, *row[1:]] for row in tokens], scores))
            assert learner.step(buffer.wait_for_batch(DEADLINE)) is not None
            version, params = learner.get_params()
            learner.close()
        return version, params

    version, expected = learned(True, False)
    for scores in ((3e38, -3e38), (3e38, 2e38), (-1e-3, -3e38)):
        found = learned(*scores)
        assert found[0] == version
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-5), found[1], expected)


@pytest.mark.system
@pytest.mark.parametrize("non_finite", ["loss", "parameters"])
def test_non_finite_parameters_are_never_published(non_finite):
    rate = 1e-2 if non_finite == "loss" else 1e38
    agent = GRPO(dataclasses.replace(CONFIG, batch_size=2, learning_rate=rate, kl_cost=0.0, max_grad_norm=None))
    batch = token_batch(MODEL.vocab_size, [5, 6], [0, 0])
    if non_finite == "loss":
        wrong = np.where(batch.data.mask > 0, np.nan, 0).astype(np.float32)
        batch = batch._replace(data=batch.data._replace(inference_logprobs=wrong))
    learner = Learner(LearnerConfig(), agent, ReplayBuffer(agent))
    before = learner.params_version
    for _ in range(3):  # after the first update, the parameters are about 1e38; later updates overflow
        with contextlib.suppress(NonFiniteLossError):
            learner.step(batch)
            before = learner.params_version
        version, params = learner.get_params()
        assert version == before and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))
    with pytest.raises(
        NonFiniteLossError, match=r"(loss of learner step \d is nan|NaN or infinite after learner step \d)"
    ):
        learner.step(batch)
    learner.close()


@pytest.mark.system
def test_update_is_compiled_once_per_length_bucket(url, run, client):
    buffer = TrajectoryBuffer(url, run=run, timeout=DEADLINE)
    learner = Learner(LearnerConfig(), CountingGRPO(CONFIG), buffer)
    traced = CountingGRPO.traced
    traced.clear()
    shapes = []
    for length in (6, 30, 80, 9, 62, 85, 120):
        tokens = np.arange(length).reshape(1, -1).repeat(16, axis=0) % MODEL.vocab_size
        client.post(Group(tokens.tolist(), tokens.tolist(), list(range(16))))
        batch = buffer.wait_for_batch(DEADLINE)
        learner.step(batch)
        shapes.append(batch.data.tokens.shape[1])
    assert shapes == [64, 64, 96, 64, 64, 96, 128]
    assert [shape[1] for shape in traced] == [64, 96, 128]
    learner.close()
    buffer.close()
