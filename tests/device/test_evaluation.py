"""Evaluations of JAX environments in jitted calls give the results of the `Evaluator` of the host."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from dm_env import specs

from rlframe.actors import Evaluator
from rlframe.actors.evaluator import EVALUATOR_RANK
from rlframe.agents import PPO
from rlframe.device.evaluation import DeviceEvaluator, EvaluationProgram
from rlframe.device.seeds import JointSeeds
from rlframe.envs.adapters import env_seed
from rlframe.envs.jax_env import BatchedJaxEnv
from rlframe.envs.jax_pool import env_keys
from rlframe.errors import EnvError, StoppedError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.params.packing import PackedParams
from rlframe.params.publication import LocalParams
from rlframe.programs import make_experiment
from rlframe.programs.policies.evaluation import Evaluations
from rlframe.programs.topologies.makers import make_agent, make_pool
from tests.fakes import ACTION_SPEC, OBSERVATION_SPEC, CountingAgent, CountingConfig, FixedParams, counting_agent
from tests.waiting import wait_until

SMALL = {"network": "mlp", "network.hidden": (16,)}


class RandomPPO(PPO):
    """A PPO that explores in evaluations, so that the returns depend on the random numbers."""

    def eval_step(self, rng, params, timestep, state):
        return self.actor_step(rng, params, timestep, state)


def publish(agent, seed) -> LocalParams:
    """Return the initial parameters of an agent."""
    params, source = agent.initial_params(jax.random.PRNGKey(seed)), LocalParams()
    source.publish(seed, PackedParams.of(agent.actor_params(params, agent.initial_learner_state(params))))
    return source


def evaluate_on_host(experiment, agent, source, num_envs, episodes):
    """Evaluate like `Evaluations` for environments that are not JAX environments."""
    experiment = experiment.for_evaluation
    pool = make_pool(experiment, num_envs, experiment.env_kwargs, env_seed(experiment.seed, EVALUATOR_RANK))
    inferencer = Inferencer(InferencerConfig(greedy=True, seed=experiment.seed), agent, source)
    return Evaluator(pool, inferencer, episodes, seed=experiment.seed).evaluate()


@pytest.mark.parametrize(
    ("agent", "env", "options"),
    [
        (RandomPPO, "jax:CartPole-v1", SMALL),
        pytest.param(
            RandomPPO,
            "jax:PositionOnlyCartPole-v1",
            {
                "network": "gru",
                "network.hidden": (16,),
                "normalize_observations": True,
                "frame_stack": 2,
                "action_repeat": 2,
                "clip_rewards": 0.5,
            },
            marks=pytest.mark.system,
        ),
        pytest.param("sac", "jax:Pendulum-v1", SMALL, marks=pytest.mark.system),
        pytest.param(
            RandomPPO,
            "jax:Breakout-MinAtar",
            {"network": "nature_cnn", "network.channels": (4,), "network.kernels": (3,), "network.strides": (1,)},
            marks=pytest.mark.system,
        ),
    ],
    ids=["random actions", "recurrent with wrappers", "sac", "images"],
)
def test_result_equals_that_of_the_host(agent, env, options):
    fields = {"seed": 5, "eval_episodes": 5, "eval_num_envs": 3, "preset": "none"}
    experiment = make_experiment(agent, env, **fields, **options)
    made = make_agent(experiment)
    source = publish(made, seed=7)
    logs = Evaluations(experiment, made, source).evaluate()
    expected = evaluate_on_host(experiment, made, source, num_envs=3, episodes=5)
    assert logs.keys() == expected.keys() and logs["episodes"] == 5 and logs["params_version"] == 7
    assert logs["length_mean"] == expected["length_mean"] > 5
    np.testing.assert_allclose(logs["returns"], expected["returns"], rtol=1e-4)
    assert len(set(logs["returns"])) > 2, "The episodes are equal, so this test compares too little."


class Counter:
    """Episodes of `length` steps with reward 1. `bad` is the step whose observation is NaN."""

    observation_space = specs.Array((2,), np.float32, "observation")
    action_space = specs.DiscreteArray(3, np.int32, "action")

    def __init__(self, length=3, bad=-1):
        self.length, self.bad, self.traced = length, bad, 0

    def reset(self, rng):
        return jnp.zeros((), jnp.int32), jnp.zeros(2)

    def step(self, rng, state, action):
        self.traced += 1
        state = state + 1
        observation = jnp.where(state == self.bad, jnp.nan, jnp.stack([1.0, 1.0 * state]))
        return state, observation, 1.0, state >= self.length, False


def evaluator(
    env, learner=None, num_envs=2, episodes=3, max_episode_length=100, agent=None, **options
) -> DeviceEvaluator:
    learner = learner or FixedParams({"w": np.float32(0.0)})
    program = EvaluationProgram(agent or counting_agent(), BatchedJaxEnv(env), **options)
    return DeviceEvaluator(
        program, env_keys(1, num_envs), learner, episodes, seed=0, max_episode_length=max_episode_length
    )


def test_evaluations_are_compiled_once_and_use_the_newest_parameters():
    env, source = Counter(length=4), LocalParams()
    again = evaluator(env, source)
    for version in (1, 2):
        traced = env.traced
        source.publish(version, PackedParams.of({"w": np.float32(version)}))
        logs = again.evaluate()
        assert logs["returns"].tolist() == [4.0, 4.0, 4.0] and logs["params_version"] == version
    assert env.traced == traced
    assert again.steps == 2 * (1 + 4 + 1 + 4), "An evaluation must end when its episodes are complete."


def test_runs_of_several_seeds_share_one_compiled_call():
    env, group = Counter(length=4), JointSeeds([1, 2])
    programs = [group.share(lambda: EvaluationProgram(counting_agent(), BatchedJaxEnv(env))) for _ in range(2)]
    source, options = FixedParams({"w": np.float32(0.0)}), {"seed": 0, "max_episode_length": 100}
    one, other = (DeviceEvaluator(each, env_keys(1, 2), source, 2, **options) for each in programs)
    one.evaluate()
    traced = env.traced
    assert other.evaluate()["returns"].tolist() == [4.0, 4.0] and env.traced == traced


class ActionReward(Counter):
    """A `Counter` whose reward is the action."""

    def step(self, rng, state, action):
        state, observation, _, *ended = super().step(rng, state, action)
        return state, observation, 1.0 * action, *ended


class Cycling(CountingAgent):
    """An agent whose actions are 1, 2, 0, 1, ... from the start of an episode."""

    def eval_step(self, rng, params, timestep, state):
        output, state = self.actor_step(rng, params, timestep, state)
        return output._replace(action=state["seen"].astype(jnp.int32) % 3), state


def test_recurrent_state_is_reset_at_the_start_of_each_episode():
    agent = Cycling(CountingConfig(), OBSERVATION_SPEC, ACTION_SPEC)
    recurrent = evaluator(ActionReward(length=4), agent=agent)
    assert recurrent.evaluate()["returns"].tolist() == [1 + 2 + 0 + 1] * 3


def test_error_of_an_endless_episode_equals_that_of_the_host():
    with pytest.raises(
        EnvError, match="environment 0 has run for 51 steps without ending its episode; the limit is 50"
    ):
        evaluator(Counter(length=10**9), max_episode_length=50).evaluate()


def test_observation_that_is_not_finite_is_an_error_that_names_the_environment():
    with pytest.raises(EnvError, match="Environment 0 gave 'observation' with nan at .0,.: expected finite numbers"):
        evaluator(Counter(length=9, bad=5)).evaluate()
    assert evaluator(Counter(length=9, bad=5), check_finite=False).evaluate()["returns"].tolist() == [9.0] * 3


def test_stop_ends_an_evaluation():
    endless = evaluator(Counter(length=10**9), max_episode_length=10**9)
    errors = []

    def evaluate() -> None:
        try:
            endless.evaluate()
        except StoppedError as error:
            errors.append(error)

    thread = threading.Thread(target=evaluate)
    thread.start()
    wait_until(lambda: endless.steps > 1000)
    endless.stop()
    thread.join(10.0)
    assert len(errors) == 1 and not thread.is_alive()
