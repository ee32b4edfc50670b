"""Environments of gymnax and jumanji follow the data contract and train in every topology (`make test-jax-suites`)."""

from __future__ import annotations

import contextlib
from importlib import metadata

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.agents.returns import generalized_advantages
from rlframe.envs import SyncEnv, list_envs
from rlframe.envs.jax_env import BatchedJaxEnv
from rlframe.envs.jax_envs import jax_tasks, make_jax_env
from rlframe.envs.jax_pool import env_keys
from rlframe.errors import UsageError
from rlframe.programs import make_experiment, run_experiment
from rlframe.types import FIRST, LAST, MID
from tests.extras import needs

pytestmark = pytest.mark.suites

CART_POLE = "gymnax:CartPole-v1"
PUSH = 1  # a constant action with which the pole falls after about 10 steps


def play(env, steps: int, env_kwargs=None, seed: int = 5):
    """Return the timesteps [T, ...] of one environment after a reset, with the action 1."""
    with SyncEnv(env, 1, "jax", seed=seed, env_kwargs=env_kwargs) as pool:
        timesteps = [pool.reset()] + [pool.step(np.array([PUSH])) for _ in range(steps)]
    return jax.tree.map(lambda *leaves: np.concatenate(leaves), *timesteps)


def keys_of_pool(seed: int, steps: int) -> list[jax.Array]:
    """Return the random keys of a pool's first environment at the steps 1, 2, ..."""
    return [jax.random.fold_in(env_keys(seed, 1)[0], time) for time in range(1, steps + 1)]


def fall() -> tuple[int, list[np.ndarray]]:
    """Step gymnax's CartPole without rlframe. Return the step at which the pole falls, and all observations."""
    import gymnax

    env, params = gymnax.make("CartPole-v1")
    keys = keys_of_pool(5, 40)
    observation, state = jax.jit(env.reset_env)(keys[0], params)
    observations, done, step = [observation], False, jax.jit(env.step_env)
    while not done:
        observation, state, _, done, _ = step(keys[len(observations)], state, PUSH, params)
        observations.append(observation)
    return len(observations) - 1, observations


def test_time_limit_of_gymnax_truncates_and_a_fall_terminates_even_at_the_limit():
    """With the value 10, the discount factor 0.9 and rewards of 1, the last target is 10 after truncation, else 1."""
    needs("gymnax")
    step, expected = fall()
    assert 5 < step < 20
    for limit, last, discount, target in ((step - 1, step - 1, 1.0, 10.0), (step, step, 0.0, 1.0)):
        types, rewards, discounts, observations = play(CART_POLE, last + 1, {"max_steps_in_episode": limit})
        assert types.tolist() == [FIRST, *[MID] * (last - 1), LAST, FIRST], limit
        assert discounts.tolist() == [1.0] * last + [discount, 1.0], limit
        assert rewards.tolist() == [0.0] + [1.0] * last + [0.0]
        np.testing.assert_allclose(observations[: last + 1], expected[: last + 1], rtol=1e-5)
        values, mask = jnp.full((last + 1, 1), 10.0), jnp.ones((last, 1))
        rewards, discounts = rewards[1 : last + 1, None], 0.9 * discounts[1 : last + 1, None]
        advantages = generalized_advantages(rewards, discounts, values, mask, gae_lambda=0.0)
        assert float(advantages[-1, 0]) + 10.0 == pytest.approx(target)


def test_breakout_of_gymnax_terminates_when_the_ball_is_lost():
    needs("gymnax")
    types, _, discounts, observations = play("gymnax:Breakout-MinAtar", 12)
    last = types.tolist().index(LAST)
    assert observations.shape == (13, 10, 10, 4) and discounts[last] == 0.0 and observations[last, 9, :, 1].sum() == 1
    assert last < 12  # the ball is lost in the row of the paddle


def test_env_kwargs_reach_the_class_of_a_gymnax_environment():
    needs("gymnax")
    env = make_jax_env("gymnax:Breakout-MinAtar", {"use_minimal_action_set": False, "max_steps_in_episode": 3})
    assert env.action_space.num_values == 6 and make_jax_env("gymnax:Breakout-MinAtar", {}).action_space.num_values == 3


def test_jumanji_steps_equal_those_of_the_library():
    needs("jumanji")
    import jumanji

    env, keys = jumanji.make("Snake-v1", time_limit=6), keys_of_pool(5, 40)
    types, rewards, discounts, observations = play("jumanji:Snake-v1", 30, {"time_limit": 6})
    step, reset = jax.jit(env.step), jax.jit(env.reset)
    state, expected = reset(keys[0])
    for t in range(31):
        assert (types[t], rewards[t], discounts[t]) == (expected.step_type, expected.reward, expected.discount)
        for name in ("grid", "step_count", "action_mask"):
            np.testing.assert_array_equal(observations[name][t], getattr(expected.observation, name))
        state, expected = reset(keys[t + 1]) if expected.last() else step(state, jnp.array(PUSH))
    assert (types == LAST).sum() >= 4 and (discounts[types == LAST] == 0.0).all()


def test_last_step_of_jumanji_with_a_discount_of_one_is_a_truncation():
    needs("jumanji")
    from jumanji.environments import Game2048
    from jumanji.types import StepType

    from rlframe.envs.jax_envs.jumanji import JumanjiEnv

    class Limited(Game2048):
        def step(self, state, action):
            state, timestep = super().step(state, action)
            return state, timestep.replace(step_type=jnp.where(state.step_count >= 2, StepType.LAST, StepType.MID))

    types, _, discounts, _ = play(lambda: JumanjiEnv("limited", Limited()), 3)
    assert types.tolist() == [FIRST, MID, LAST, FIRST] and discounts.tolist() == [1.0] * 4


# Environments that rlframe refuses -> a part of the message. Sokoban and MNIST download data.
AGENTS = "one reward to each of several agents"
REFUSED = {
    "gymnax 0": {"SimpleBandit-bsuite": "SimpleBandit-bsuite.step cannot be traced"},  # a mistake in this version
    "gymnax 1": {},
    "jumanji 1": {"Connector-v3": AGENTS, "LevelBasedForaging-v0": AGENTS, "SearchAndRescue-v0": AGENTS},
}
DOWNLOADS = {"MNISTBandit-bsuite", "Sokoban-v0"}


@pytest.mark.parametrize("suite", ["gymnax", "jumanji"])
def test_every_environment_can_be_traced_or_is_refused_with_the_reason(suite):
    needs(suite)
    tasks = set(jax_tasks(suite)) - DOWNLOADS
    refused = REFUSED[f"{suite} {metadata.version(suite)[0]}"]
    assert len(tasks) > 20 and refused.keys() <= tasks
    for task in tasks:
        reason = refused.get(task)
        with contextlib.nullcontext() if reason is None else pytest.raises(UsageError, match=reason):
            BatchedJaxEnv(make_jax_env(f"{suite}:{task}", {}))


@pytest.mark.parametrize(
    ("suite", "name", "env_kwargs", "message"),
    [
        ("gymnax", "gymnax:CartPol-v1", {}, "is not a JAX environment: .* Did you mean 'gymnax:CartPole-v1'"),
        ("gymnax", CART_POLE, {"max_steps": 3}, "does not accept env_kwargs .* Did you mean 'max_steps_in_episode'"),
        ("jumanji", "jumanji:Game248-v1", {}, "Did you mean 'jumanji:Game2048-v1'"),
        ("jumanji", "jumanji:Snake-v1", {"limit": 3}, "does not accept .* expected .*time_limit"),
    ],
)
def test_unknown_names_and_arguments_are_refused(suite, name, env_kwargs, message):
    needs(suite)
    with pytest.raises(UsageError, match=message):
        make_jax_env(name, env_kwargs)


@pytest.mark.parametrize(("suite", "name"), [("gymnax", "gymnax:Breakout-MinAtar"), ("jumanji", "jumanji:Game2048-v1")])
def test_installed_suites_are_listed(suite, name):
    needs(suite)
    assert (name, suite) in list_envs()


@pytest.mark.parametrize("topology", ["fused", "single_process", "heavy_env", "light_env", "distributed", "elastic"])
@pytest.mark.parametrize(  # no evaluation of Game2048, which a greedy policy may never end
    ("name", "env_kwargs", "episodes"),
    [(CART_POLE, {"max_steps_in_episode": 5}, 1), ("jumanji:Game2048-v1", {"board_size": 3}, 0)],
    ids=["gymnax", "jumanji"],
)
def test_environment_of_a_suite_trains_in_every_topology(name, env_kwargs, episodes, topology, tmp_path):
    needs(name.partition(":")[0])
    engine = {"engine": "threads"} if topology in ("heavy_env", "light_env", "distributed") else {}
    options = {"num_envs": 2, "unroll_length": 8, "network": "mlp", "network.hidden": (8,), "eval_episodes": episodes}
    options |= {"num_minibatches": 2, "num_epochs": 1, "steps": 64, "env_kwargs": env_kwargs, **engine}
    result = run_experiment(make_experiment("ppo", name, topology=topology, **options), run_dir=tmp_path / "run")
    assert result.env_steps >= 64 and result.learner_steps > 0 and result.episodes == episodes
