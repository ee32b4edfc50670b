"""Tests of action masks in agents: losses equal those computed with NumPy, and only legal actions are chosen."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents import (
    DQN,
    IMPALA,
    PPO,
    PQN,
    R2D2,
    Agent,
    DQNConfig,
    IMPALAConfig,
    Normalized,
    PPOConfig,
    PQNConfig,
    R2D2Config,
)
from rlframe.agents.action_masks import ILLEGAL, ActionMask
from rlframe.agents.distributions import Categorical
from rlframe.agents.dqn_heads import Categories, Expectation, Quantiles
from rlframe.agents.networks import MLPConfig
from rlframe.agents.q_learning import epsilon_greedy
from rlframe.agents.recurrent import GRUConfig
from rlframe.agents.returns import vtrace
from rlframe.errors import UsageError
from rlframe.types import LAST, MID, ActionMaskArray, MultiDiscreteArray, SequenceBatch, TransitionBatch, specs
from tests.agents import batches
from tests.agents.batches import VECTOR, started

ACTIONS = specs.DiscreteArray(4, name="action")
MASKED = {"observation": VECTOR, "action_mask": ActionMaskArray(4, np.int8, "action_mask")}
NEVER = 3  # an action that is always illegal
GAMMA = 0.9


def weights(seed, outputs):
    return np.random.RandomState(seed).randn(3, outputs).astype(np.float32)


def linear(*sizes):
    """Return a net_factory of linear outputs. It gets the observation without the mask: an array [3]."""

    def make(observation_spec, action_spec):
        assert observation_spec is VECTOR and action_spec is ACTIONS
        init = lambda rng, observation: [jnp.asarray(weights(i, size)) for i, size in enumerate(sizes)]  # noqa: E731
        apply = lambda params, observation: tuple(observation @ matrix for matrix in params)  # noqa: E731
        return types.SimpleNamespace(init=init, apply=apply)

    return make


def drawn(lead, seed=0):
    """Return observations [*lead, ...] with random masks. Each mask allows 2 or 3 actions, but never `NEVER`."""
    random = np.random.RandomState(seed)
    mask = (np.arange(4) != random.randint(4, size=(*lead, 1))).astype(np.int8)
    mask[..., NEVER] = 0
    return {"observation": random.randn(*lead, 3).astype(np.float32), "action_mask": mask}


def legal_action(mask, seed=0):
    """Return a random legal action for each mask."""
    return np.argmax(np.random.RandomState(seed).rand(*mask.shape) * mask, axis=-1).astype(np.int32)


def log_policy(logits, mask):
    """Return the log-probabilities of legal actions; 0 for illegal ones."""
    exp = np.exp(logits) * mask
    return np.log(np.where(mask, exp / exp.sum(axis=-1, keepdims=True), 1.0))


def entropy(logits, mask):
    return -(np.exp(log_policy(logits, mask)) * log_policy(logits, mask)).sum(axis=-1)


def best(values, mask):
    return np.where(mask, values, -np.inf).argmax(axis=-1)


def chosen(values, action):
    return np.take_along_axis(values, action[..., None], axis=-1)[..., 0]


def unroll(lead, action_seed=0, **fields):
    """Return a `SequenceBatch` of B environments and T steps. Environment 0 terminates, environment 1 is truncated."""
    rows, length = lead
    random = np.random.RandomState(5)
    observation = drawn((rows, length + 1))
    step_type = np.full((rows, length + 1), MID, np.uint8)
    step_type[0, 1] = step_type[1, 2] = LAST
    observation["action_mask"][0, 1] = 0  # a terminated episode has no legal action
    discount = np.ones((rows, length), np.float32)
    discount[0, 0] = 0.0
    data = {
        "observation": observation,
        "step_type": step_type,
        "action": legal_action(observation["action_mask"][:, :-1], action_seed),
        "reward": random.randn(rows, length).astype(np.float32),
        "discount": discount,
        "extras": {},
        "agent_state": (),
    }
    return SequenceBatch(**{**data, **fields})


def learned(agent, method, params, learner_state, batch):
    """Return the logs of a batch, with the loss. Assert that gradients are finite, and 0 for the outputs of `NEVER`."""
    logs, grads = jax.jit(getattr(agent, method))(params, learner_state, batch)
    assert all(np.isfinite(each).all() for each in jax.tree.leaves((logs, grads)))
    per_action = np.asarray(grads[0]).reshape(3, 4, -1)
    assert not per_action[:, NEVER].any() and per_action[:, :NEVER].any()
    return logs


def test_ppo_loss_equals_numpy():
    cfg = PPOConfig(unroll_length=3, discount=GAMMA, gae_lambda=1.0, entropy_cost=0.3, normalize_advantages=False)
    agent = PPO(cfg, MASKED, ACTIONS, linear(4, 1))
    params, learner_state = started(agent)
    data = unroll((2, 3))
    observed, mask = data.observation["observation"], data.observation["action_mask"]
    value = (observed @ weights(1, 1))[..., 0]
    old_log_prob = np.random.RandomState(6).uniform(-1.5, -0.1, (2, 3)).astype(np.float32)
    data = data._replace(extras={"log_prob": old_log_prob, "value": value[:, :-1] + 0.1})
    losses = []
    for row, t in ((0, 0), (0, 2), (1, 0), (1, 1)):  # the other steps are after LAST
        returns, scale = 0.0, 1.0
        for k in range(t, 3):
            returns, scale = returns + scale * data.reward[row, k], scale * GAMMA * data.discount[row, k]
            if k == 2 or data.step_type[row, k + 1] == LAST:
                returns += scale * (value[row, 3] if k == 2 else data.extras["value"][row, k + 1])
                break
        advantage = returns - data.extras["value"][row, t]
        log_probs = log_policy(observed[row, t] @ weights(0, 4), mask[row, t])
        ratio = np.exp(log_probs[data.action[row, t]] - old_log_prob[row, t])
        surrogate = min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
        error = 0.5 * (value[row, t] - returns) ** 2
        losses.append(-surrogate + 0.5 * error - 0.3 * entropy(observed[row, t] @ weights(0, 4), mask[row, t]))
    logs = learned(agent, "minibatch_gradients", params, learner_state, jax.jit(agent.rollout)(params, data))
    np.testing.assert_allclose(logs["loss"], np.mean(losses), rtol=1e-4)


def test_impala_loss_equals_numpy():
    cfg = IMPALAConfig(unroll_length=3, batch_size=2, discount=GAMMA, entropy_cost=0.3)
    agent = IMPALA(cfg, MASKED, ACTIONS, linear(4, 1))
    params, learner_state = started(agent)
    old_log_prob = np.random.RandomState(6).uniform(-1.5, -0.1, (2, 3)).astype(np.float32)
    data = unroll((2, 3), extras={"log_prob": old_log_prob})
    observed, mask = data.observation["observation"], data.observation["action_mask"]
    counts = (data.step_type[:, :-1] != LAST).astype(np.float32)
    logits, value = observed @ weights(0, 4), (observed @ weights(1, 1))[..., 0]
    allowed = np.where(mask.any(axis=-1, keepdims=True), mask, 1)
    log_probs = chosen(log_policy(logits, allowed)[:, :-1], data.action)
    rhos = np.exp(log_probs - old_log_prob)
    returns = vtrace(
        value.T, data.reward.T, GAMMA * data.discount.T, rhos.T, counts.T, rho_bar=1.0, c_bar=1.0, lambda_=1.0
    )
    parts = -log_probs * returns.advantages.T + 0.5 * 0.5 * (returns.targets.T - value[:, :-1]) ** 2
    expected = ((parts - 0.3 * entropy(logits, allowed)[:, :-1]) * counts).sum()
    loss = jax.jit(agent.loss)(params, learner_state, batches.whole(data, 2))[0]
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    learned(agent, "compute_gradients", params, learner_state, batches.whole(data, 2))


HEADS = {"expectation": Expectation(), "quantiles": Quantiles(3), "categorical": Categories(3, -2.0, 2.0)}


@pytest.mark.parametrize(
    ("head", "double"),
    [
        ("expectation", False),
        ("quantiles", False),
        ("categorical", True),
        pytest.param("expectation", True, marks=pytest.mark.system),
        pytest.param("quantiles", True, marks=pytest.mark.system),
        pytest.param("categorical", False, marks=pytest.mark.system),
    ],
)
def test_dqn_loss_equals_numpy(head, double):
    head = HEADS[head]
    cfg = DQNConfig(batch_size=6, head=head, double=double, prioritized=True, importance_exponent=0.4)
    agent = DQN(cfg, MASKED, ACTIONS, linear(4 * head.size))
    params, learner_state = started(agent)
    target_weights = weights(9, 4 * head.size)
    learner_state = learner_state._replace(target_params=[jnp.asarray(target_weights)])
    now, following, random = drawn((6,)), drawn((6,), 1), np.random.RandomState(3)
    following["action_mask"][0] = 0  # the episode has terminated
    discount = np.array([0.0, *[GAMMA] * 5], np.float32)
    reward, action = random.randn(6).astype(np.float32), legal_action(now["action_mask"])
    batch = batches.whole(TransitionBatch(now, action, reward, discount, following, {}), 6)

    def outputs(matrix, observation):
        return (observation["observation"] @ matrix).reshape(6, 4, head.size)

    online, later = outputs(weights(0, 4 * head.size), now), outputs(target_weights, following)
    selector = outputs(weights(0, 4 * head.size), following) if double else later
    next_action = best(np.asarray(head.values(jnp.asarray(selector))), following["action_mask"])
    rows = np.arange(6)
    expected = head.loss(online[rows, action], reward, discount, later[rows, next_action])
    importance = (1.0 / batch.probabilities) ** 0.4
    logs = learned(agent, "compute_gradients", params, learner_state, batch)
    np.testing.assert_allclose(logs["loss"], np.mean(importance / importance.max() * expected.loss), rtol=1e-4)
    np.testing.assert_allclose(logs["priorities"], expected.priority + 1e-6, rtol=1e-4)
    values = np.asarray(head.values(jnp.asarray(online)))
    np.testing.assert_allclose(logs["value"], values[now["action_mask"] == 1].mean(), rtol=1e-4)


def test_munchausen_loss_equals_numpy():
    cfg = DQNConfig(batch_size=6, munchausen=True, munchausen_temperature=0.5)
    agent = DQN(cfg, MASKED, ACTIONS, linear(4))
    params, learner_state = started(agent)
    now, following, reward = drawn((6,)), drawn((6,), 1), np.random.RandomState(3).randn(6).astype(np.float32)
    action, discount = legal_action(now["action_mask"]), np.full(6, GAMMA, np.float32)
    values, next_values = (each["observation"] @ weights(0, 4) for each in (now, following))
    bonus = 0.9 * np.clip(0.5 * chosen(log_policy(values / 0.5, now["action_mask"]), action), -1.0, 0.0)
    log_probs = log_policy(next_values / 0.5, following["action_mask"])
    soft = (np.exp(log_probs) * following["action_mask"] * (next_values - 0.5 * log_probs)).sum(axis=-1)
    error = np.abs(reward + bonus + GAMMA * soft - chosen(values, action))
    expected = np.where(error < 1, 0.5 * error**2, error - 0.5).mean()
    batch = batches.whole(TransitionBatch(now, action, reward, discount, following, {}), 6)
    logs = learned(agent, "compute_gradients", params, learner_state, batch)
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-4)


def test_pqn_loss_equals_numpy():
    agent = PQN(
        PQNConfig(unroll_length=3, discount=GAMMA, q_lambda=0.0, epsilon=0.1, learning_rate=1e-3),
        MASKED,
        ACTIONS,
        linear(4),
    )
    params, learner_state = started(agent)
    data = unroll((2, 3))
    mask = data.observation["action_mask"]
    values = data.observation["observation"] @ weights(0, 4)
    highest = chosen(values, best(values, mask))
    _, output = act(agent, jax.tree.map(lambda leaf: leaf.reshape(8, -1), data.observation), params, learner_state)
    counts = mask.any(axis=-1)  # the action after the end of an episode is ignored
    np.testing.assert_allclose(output.extras["value"].reshape(2, 4)[counts], highest[counts], rtol=1e-5)
    assert np.abs(output.extras["value"]).max() < 100  # also after the end of an episode, where no action is legal
    data = data._replace(extras={"value": output.extras["value"].reshape(2, 4)[:, :-1]})
    errors = (
        data.reward
        + GAMMA * data.discount * np.where(counts, highest, 0.0)[:, 1:]
        - chosen(values[:, :-1], data.action)
    )
    learns = data.step_type[:, :-1] != LAST
    logs = learned(agent, "minibatch_gradients", params, learner_state, jax.jit(agent.rollout)(params, data))
    np.testing.assert_allclose(logs["loss"], (0.5 * errors**2)[learns].mean(), rtol=1e-4)


def test_r2d2_loss_equals_numpy():
    cfg = R2D2Config(batch_size=2, sequence_length=3, burn_in=0, period=3, n_step=1, discount=GAMMA, rescaling=None)
    agent = R2D2(cfg, MASKED, ACTIONS, linear(4))
    params, learner_state = started(agent)
    learner_state = learner_state._replace(target_params=[jnp.asarray(weights(9, 4))])
    data = unroll((2, 3), agent_state=agent.initial_state(2))
    observed, mask = data.observation["observation"], data.observation["action_mask"]
    values, later = observed @ weights(0, 4), observed @ weights(9, 4)
    following = chosen(later, best(values, mask))[:, 1:]
    errors = data.reward + GAMMA * data.discount * following - chosen(values[:, :-1], data.action)
    errors *= data.step_type[:, :-1] != LAST
    batch = batches.whole(data, 2)
    importance = (1.0 / batch.probabilities) ** 0.6
    expected = np.mean(importance / importance.max() * (0.5 * errors**2).sum(axis=1))
    logs = learned(agent, "compute_gradients", params, learner_state, batch)
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-4)
    assert np.abs(logs["value"]) < 100


def act(agent, observation, params, learner_state, method="actor_step", seed=0):
    """Return (actions [B], output) for observations [B, ...]."""
    size = len(jax.tree.leaves(observation)[0])
    timestep = batches.timestep(VECTOR, size)._replace(observation=observation)
    actor_params = agent.actor_params(params, learner_state)
    state = agent.initial_state(size)
    output, _ = jax.jit(getattr(agent, method))(jax.random.PRNGKey(seed), actor_params, timestep, state)
    return np.asarray(output.action), output


SMALL = MLPConfig((8,))
AGENTS = {
    "ppo": lambda: PPO(PPOConfig(), MASKED, ACTIONS, SMALL),
    "recurrent ppo": lambda: PPO(PPOConfig(), MASKED, ACTIONS, GRUConfig((4,), 3)),
    "normalized impala": lambda: Normalized(IMPALA(IMPALAConfig(), MASKED, ACTIONS, GRUConfig((4,), 3))),
    "pqn": lambda: PQN(PQNConfig(epsilon=0.5), MASKED, ACTIONS, SMALL),
    "dqn": lambda: DQN(DQNConfig(epsilon=0.5, head=HEADS["categorical"]), MASKED, ACTIONS, SMALL),
    "noisy dqn": lambda: DQN(DQNConfig(epsilon=0.0), MASKED, ACTIONS, MLPConfig((8,), dueling=True, noisy=0.5)),
    "r2d2": lambda: R2D2(R2D2Config(epsilon=0.9, epsilon_exponent=0.1), MASKED, ACTIONS, GRUConfig((4,), 3)),
}


SLOW = ("normalized impala", "noisy dqn", "r2d2")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.system] * (name in SLOW)) for name in AGENTS])
def test_agents_choose_all_legal_actions_and_no_others(name):
    agent = AGENTS[name]()
    params, learner_state = started(agent)
    observation = drawn((256,))
    mask = observation["action_mask"]
    for method in ("actor_step", "eval_step"):
        action, _ = act(agent, observation, params, learner_state, method)
        assert chosen(mask, action).all()
        if name != "noisy dqn":
            assert method == "eval_step" or set(action) == {0, 1, 2}


def test_network_does_not_get_the_mask_and_mask_is_not_normalized():
    agent = Normalized(PPO(PPOConfig(unroll_length=3), MASKED, ACTIONS, linear(4, 1)))
    params, learner_state = started(agent)
    data, statistics = agent.normalized(learner_state.statistics, unroll((2, 3)))
    assert [each.shape for each in statistics.observation.mean] == [(3,)]
    np.testing.assert_array_equal(data.observation["action_mask"], unroll((2, 3)).observation["action_mask"])
    assert jax.tree.map(np.shape, params) == [(3, 4), (3, 1)]
    several = {**MASKED, "other": VECTOR}
    assert ActionMask(several).rest_spec == {"observation": VECTOR, "other": VECTOR}
    assert ActionMask(VECTOR).rest_spec is VECTOR and ActionMask(VECTOR).legal(np.zeros((1, 3))) is None


def test_each_choice_of_a_multi_discrete_action_has_its_part_of_the_mask():
    mask_spec = ActionMaskArray((2, 3), np.bool_)
    agent = PPO(PPOConfig(), {"x": VECTOR, "mask": mask_spec}, MultiDiscreteArray([2, 3]), SMALL)
    params, learner_state = started(agent)
    mask = np.tile(np.array([0, 1, 1, 0, 1], bool), (64, 1))
    observation = {"x": np.random.RandomState(0).randn(64, 3).astype(np.float32), "mask": mask}
    action, output = act(agent, observation, params, learner_state)
    assert (action[:, 0] == 1).all() and set(action[:, 1]) == {0, 2}
    (logits, _) = agent.network.apply(params, observation)
    two = np.asarray(logits)[:, [2, 4]]
    expected = log_policy(two, np.ones_like(two))[np.arange(64), action[:, 1] // 2]  # the first choice is certain
    np.testing.assert_allclose(output.extras["log_prob"], expected, rtol=1e-4, atol=1e-6)
    assert mask_spec.has_choice(mask[:2]).tolist() == [True, True]
    assert mask_spec.has_choice(np.array([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0]])).tolist() == [0, 0, 1]


def test_random_actions_are_uniform_over_legal_actions():
    legal = np.tile([True, False, True, True, False], (30_000, 1))
    greedy = jnp.zeros(30_000, jnp.int32)
    action, explores = epsilon_greedy(jax.random.PRNGKey(0), greedy, jnp.float32(0.9), 5, jnp.asarray(legal))
    counts = np.bincount(np.asarray(action)[np.asarray(explores)], minlength=5) / np.sum(explores)
    np.testing.assert_allclose(counts, [1 / 3, 0, 1 / 3, 1 / 3, 0], atol=0.01)


def test_repeated_random_action_ends_when_it_becomes_illegal():
    cfg = DQNConfig(epsilon=0.0, exploration_duration_exponent=2.0)
    agent = DQN(cfg, MASKED, ACTIONS, SMALL)
    params, learner_state = started(agent)
    observation = {"observation": np.zeros((2, 3), np.float32), "action_mask": np.array([[0, 1, 0, 0], [1, 1, 0, 0]])}
    state = agent.initial_state(2)._replace(action=jnp.array([0, 0]), steps_left=jnp.array([7, 7]))
    timestep = batches.timestep(VECTOR, 2)._replace(observation=observation)
    output, after = agent.actor_step(jax.random.PRNGKey(0), agent.actor_params(params, learner_state), timestep, state)
    assert output.action.tolist() == [1, 0] and after.steps_left.tolist() == [0, 6]


def test_custom_agent_supports_masks_with_one_line():
    class Mine(Agent):
        def __init__(self, cfg, observation_spec, action_spec):
            super().__init__(cfg, observation_spec, action_spec)
            self.network = ActionMask(observation_spec).network(linear(4)(VECTOR, action_spec))

    agent = Mine(None, MASKED, ACTIONS)
    observation = drawn((2, 5))
    (logits,) = agent.network.apply(agent.initial_params(jax.random.PRNGKey(0)), observation)
    mask = observation["action_mask"]
    np.testing.assert_allclose(logits, np.where(mask, observation["observation"] @ weights(0, 4), ILLEGAL), rtol=1e-5)


def test_distribution_whose_size_does_not_fit_the_mask_is_refused():
    agent = PPO(PPOConfig(), MASKED, ACTIONS, SMALL, policy_factory=lambda spec: Categorical(5))
    with pytest.raises(UsageError, match="mask has 4 elements, but the network has 5 outputs .*policy_factory"):
        _ = agent.step_spec
