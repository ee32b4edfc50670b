"""`rlframe.load` and `rlframe.export` return policies that act like the policy in `rlframe evaluate`."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import rlframe
from rlframe.actors.evaluator import EVALUATOR_RANK
from rlframe.agents.networks import MLPConfig, NatureCNNConfig
from rlframe.envs.adapters import env_seed
from rlframe.errors import CheckpointError, RlframeError, UsageError
from rlframe.learners.checkpoints import Checkpointer, SavedCheckpoint
from rlframe.programs.options import registry
from rlframe.programs.options.make_experiment import make_experiment
from rlframe.programs.run_dir.directory import RunDir
from rlframe.types import FIRST, LAST
from tests.programs.running_program import ROOT

EPISODES, SEED = 3, 5
SMALL_CNN = NatureCNNConfig(channels=(4,), kernels=(8,), strides=(4,), hidden=(16,))
IMAGES = """
import gymnasium
import numpy as np

class Images(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (36, 36, 1), np.uint8)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample() * 0 + self.np_random.integers(256, dtype=np.uint8), {}

    def step(self, action):
        self.steps += 1
        image = np.full((36, 36, 1), 80 * action + self.steps, np.uint8)
        return image, float(action == self.steps % 3), False, self.steps == 20, {}

def make_env():
    return Images()
"""
RECURRENT = """
import dataclasses

import jax
import jax.numpy as jnp

from rlframe import Agent
from rlframe.types import FIRST, AgentOutput, ReplaySpec, Sequence


@dataclasses.dataclass(frozen=True)
class Config:
    learning_rate: float = 3e-3


class Remembers(Agent):
    '''A simple recurrent network with a state of two arrays, and a basic policy gradient.'''

    config_cls = Config
    replay_spec = ReplaySpec("queue", Sequence(8), batch_size=4, capacity=4000)

    def initial_params(self, rng):
        sizes = {"into": (*self.observation_spec.shape, 8), "on": (8, 8), "out": (9, self.action_spec.num_values)}
        return {name: 0.3 * jax.random.normal(rng, size) for name, size in sizes.items()}

    def initial_state(self, batch_size):
        return {"hidden": jnp.full((batch_size, 8), 0.5), "steps": jnp.zeros(batch_size, jnp.int32)}

    def unroll(self, params, observation, state):
        hidden = jnp.tanh(observation @ params["into"] + state["hidden"] @ params["on"])
        features = jnp.concatenate([hidden, jnp.sin(state["steps"])[:, None]], axis=-1)
        return features @ params["out"], {"hidden": hidden, "steps": state["steps"] + 1}

    def actor_step(self, rng, params, timestep, state):
        logits, state = self.unroll(params, timestep.observation, state)
        return AgentOutput(jax.random.categorical(rng, logits).astype(jnp.int32)), state

    def eval_step(self, rng, params, timestep, state):
        logits, state = self.unroll(params, timestep.observation, state)
        return AgentOutput(logits.argmax(-1).astype(jnp.int32)), state

    def loss(self, params, learner_state, batch):
        data, initial = batch.data, self.initial_state(len(batch.data.reward))

        def step(state, inputs):
            observation, first = inputs
            fresh = lambda new, old: jnp.where(first.reshape(-1, *[1] * (old.ndim - 1)), new, old)
            logits, state = self.unroll(params, observation, jax.tree.map(fresh, initial, state))
            return state, logits

        inputs = data.observation[:, :-1].swapaxes(0, 1), (data.step_type[:, :-1] == FIRST).T
        logits = jax.lax.scan(step, data.agent_state, inputs)[1].swapaxes(0, 1)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), data.action[..., None], axis=-1)[..., 0]
        return -jnp.mean(chosen * data.reward), {}
"""
CARTPOLE = "gymnasium:CartPole-v1"
RUNS = {
    "ppo": ("ppo", CARTPOLE, {"unroll_length": 32, "num_epochs": 1}),
    "repeating dqn": ("dqn", CARTPOLE, {"min_replay_size": 100, "exploration_duration_exponent": 2.0}),
    "impala": ("impala", CARTPOLE, {"unroll_length": 16, "batch_size": 4}),
    "normalized": (
        f"{ROOT}/examples/custom_agent.py:Reinforce",
        CARTPOLE,
        {"normalize_observations": True, "normalize_rewards": True},
    ),
    "a file's, recurrent": ("recurrent.py:Remembers", CARTPOLE, {}),
    "images": ("dqn", "images.py:make_env", {"min_replay_size": 100, "network_config": SMALL_CNN}),
}


SLOW = [name for name in RUNS if name != "normalized"]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.system] if name in SLOW else []) for name in RUNS]
)
def run(request, tmp_path_factory):
    """Train an agent for 600 steps. Return the run directory and the name of the environment."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "images.py").write_text(IMAGES)
    (folder / "recurrent.py").write_text(RECURRENT)
    agent, env, options = RUNS[request.param]
    agent = f"{folder}/{agent}" if agent.startswith("recurrent") else agent
    if env != CARTPOLE:
        env, options = f"{folder}/{env}", {**options, "network": "nature_cnn"}
    common = {"steps": 600, "num_envs": 4, "preset": "none", "eval_episodes": 2, "quiet": True}
    rlframe.train(agent, env, run_dir=folder / "run", **common, **options)
    return folder / "run", env


def play_episodes(env, act, type="loop", **env_kwargs):
    """Play one episode in each of `EPISODES` environments, with the seeds of an evaluation. Return the returns."""
    seed = env_seed(SEED, EVALUATOR_RANK)
    pool = rlframe.SyncEnv(registry.env_name_or_builder(env), EPISODES, type, seed=seed, env_kwargs=env_kwargs)
    timestep, returns, over = pool.reset(), np.zeros(EPISODES), np.zeros(EPISODES, bool)
    while not over.all():
        timestep = pool.step(act(timestep.observation, timestep.step_type == FIRST))
        returns += np.where(over, 0.0, timestep.reward)
        over |= timestep.step_type == LAST
    pool.close()
    return returns


def act_with_resets(policy):
    """Return a function that computes actions. For environments that start an episode, it first resets the policy."""

    def act(observation, begins):
        if not begins.all():
            policy.reset(begins)
        return policy.act(observation)

    return act


def test_loaded_policy_gets_the_same_returns_as_rlframe_evaluate(run):
    path, env = run
    policy = rlframe.load(path)
    expected = rlframe.evaluate(path, episodes=EPISODES, seed=SEED)
    np.testing.assert_array_equal(np.sort(play_episodes(env, act_with_resets(policy))), np.sort(expected["returns"]))
    assert policy.version == expected["params_version"] > 1


@pytest.mark.system
def test_loaded_sac_policy_normalizes_observations(tmp_path):
    options = {"min_replay_size": 100, "batch_size": 16, "network": "mlp", "network_config": MLPConfig((16,))}
    result = rlframe.train("sac", "gymnasium:Pendulum-v1", run_dir=tmp_path / "run", steps=200, num_envs=2, seed=SEED,
                           preset="none", quiet=True, eval_episodes=EPISODES, normalize_observations=True,
                           **options)  # fmt: skip
    policy = rlframe.load(tmp_path / "run")
    assert play_episodes("gymnasium:Pendulum-v1", act_with_resets(policy)).mean() == result.return_mean


@pytest.mark.system
def test_loaded_atari_policy_gets_the_same_returns_as_rlframe_evaluate(tmp_path):
    rlframe.train("dqn", "Pong-v5", run_dir=tmp_path / "run", steps=400, num_envs=4, preset="none", eval_episodes=1,
                  min_replay_size=200, env_kwargs={"max_episode_steps": 60}, network="nature_cnn", quiet=True,
                  network_config=SMALL_CNN)  # fmt: skip
    policy = rlframe.load(tmp_path / "run")
    expected = rlframe.evaluate(tmp_path / "run", episodes=EPISODES, seed=SEED)
    returns = play_episodes("Pong-v5", act_with_resets(policy), "envpool", max_episode_steps=60)
    np.testing.assert_array_equal(np.sort(returns), np.sort(expected["returns"]))
    assert policy.version == expected["params_version"] > 1 and policy.agent.observation_spec.dtype == np.uint8


def test_exported_function_acts_like_the_policy(run, tmp_path):
    path, env = run
    policy = rlframe.load(path)
    file = rlframe.export(path, tmp_path / "policy.stablehlo")
    loaded = jax.export.deserialize(file.read_bytes())
    ours, steps = act_with_resets(policy), 0
    state = [np.full_like(leaf, 7) for leaf in jax.tree.leaves(policy.agent.initial_state(EPISODES))]  # any values

    def act(observation, begins):
        nonlocal state, steps
        action, state = loaded.call(observation, begins, state, np.uint32(steps))
        np.testing.assert_array_equal(ours(observation, begins), action)
        steps += 1
        return np.asarray(action)

    play_episodes(env, act)
    assert steps > 8
    for ours_leaf, leaf in zip(jax.tree.leaves(policy.state), state, strict=True):
        np.testing.assert_allclose(ours_leaf, leaf, rtol=1e-5)


def test_single_observation_and_batch_give_equal_actions(run):
    path, _ = run
    policy = rlframe.load(path)
    spec = policy.agent.observation_spec
    observations = np.random.default_rng(0).integers(0, 100, (5, *spec.shape)).astype(spec.dtype)
    batch = policy.act(observations)
    assert batch.shape == (5,) and batch.dtype == policy.codec.action.dtype == np.int64
    for observation, action in zip(observations, batch):
        policy.reset()
        single = policy.act(observation)
        assert np.shape(single) == () and single == action
    with pytest.raises(UsageError, match="acts in 1 environments, got observations of 5: call reset"):
        policy.act(observations)
    policy.reset()
    with pytest.raises(UsageError, match=r"must be .* of shape .*, got .* of shape \(7,\).*or a batch"):
        policy.act(np.zeros(7, spec.dtype))
    with pytest.raises(UsageError, match="'observation' must be .*, got "):
        policy.act({"position": observations})


def test_exploring_policy_keeps_its_state(tmp_path):
    rlframe.train("dqn", CARTPOLE, run_dir=tmp_path / "run", steps=300, num_envs=4, preset="none", quiet=True,
                  min_replay_size=100, epsilon=1.0, exploration_duration_exponent=2.0, eval_episodes=1)  # fmt: skip
    policy = rlframe.load(tmp_path / "run")
    observation = np.zeros((64, 4), np.float32)
    drawn = [policy.act(observation, explore=True) for _ in range(3)]
    assert len(set(drawn[0].tolist())) == 2
    assert policy.state.action.shape == (64,) and (drawn[1][policy.state.steps_left > 0] >= 0).all()
    kept = policy.state
    again = policy.act(observation, state=kept._replace(steps_left=np.full(64, 9, np.int32)), explore=True)
    np.testing.assert_array_equal(again, kept.action)  # the policy repeats the actions that its state stores


@pytest.mark.system
def test_checkpoints_are_loaded_by_name_and_missing_checkpoints_are_refused(tmp_path, monkeypatch):
    values = []
    result = rlframe.train("ppo", CARTPOLE, run_dir=tmp_path / "run", steps=512, num_envs=4, preset="none",
                           unroll_length=16, checkpoint_every=256, eval_episodes=1, quiet=True,
                           callbacks=[lambda info: values.append(info.values)])  # fmt: skip
    assert result.env_steps >= 512 and any("loss" in row for row in values)
    steps = sorted(int(path.name) for path in RunDir(tmp_path / "run").checkpoints.iterdir() if path.name.isdigit())
    versions = [rlframe.load(tmp_path / "run", step).version for step in steps]
    assert versions == sorted(set(versions)) and rlframe.load(tmp_path / "run").version == versions[-1]
    with pytest.raises(CheckpointError, match=f"There is no checkpoint 99999 .*; there are {steps[0]}"):
        rlframe.load(tmp_path / "run", 99999)
    with pytest.raises(UsageError, match="There is no run in"):
        rlframe.load(tmp_path)
    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match=r"earlier version.* train --config .*"):
        without_codec = SavedCheckpoint(tmp_path, [], {"counters": {}})
        patched.setattr(Checkpointer, "read", lambda self, step: without_codec)
        rlframe.load(tmp_path / "run")
    with pytest.raises(RlframeError, match="Could not write /proc/nope/policy: No such file"):
        rlframe.export(tmp_path / "run", "/proc/nope/policy")
    more = rlframe.train(run_dir=tmp_path / "run", resume=True, steps=700, quiet=True)
    assert more.env_steps >= 700 and more.learner_steps > result.learner_steps


def test_train_refuses_invalid_input(tmp_path):
    with pytest.raises(UsageError, match=r"agent must be a subclass of rlframe\.Agent, or a name .*; got 3\."):
        rlframe.train(3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="resume needs run_dir"):
        rlframe.train(resume=True)
    with pytest.raises(UsageError, match=r"There is no option 'stepz' of an experiment with ppo\. .*steps"):
        rlframe.train("ppo", stepz=3)
    directory = RunDir(tmp_path / "run")
    directory.create()
    directory.write_config(make_experiment("ppo"), {})
    with pytest.raises(UsageError, match="There is no option 'stepz' of an experiment with ppo"):
        rlframe.train(run_dir=tmp_path / "run", resume=True, stepz=3)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"episodes": "5"}, r"^episodes: expected int, got '5' \(str\)\.$"),
        ({"episodes": 2.5}, r"^episodes: expected int, got 2\.5\.$"),
        ({"episodes": 0}, r"^episodes must be at least 1, got 0\.$"),
        ({"num_envs": 1.5}, r"^num_envs: expected int or None, got 1\.5\.$"),
        ({"max_episode_length": "9"}, r"^max_episode_length: expected int or None, got '9' \(str\)\.$"),
        ({"seed": -1}, r"^seed must be between 0 and 2147483647, got -1\.$"),
        ({"seed": 2**31}, r"^seed must be between 0 and 2147483647, got 2147483648\.$"),
        ({"run_dir": None}, r"^run_dir: expected str, got None\.$"),
    ],
)
def test_evaluate_refuses_invalid_input(options, why):
    with pytest.raises(UsageError, match=why):
        rlframe.evaluate(**{"run_dir": "nowhere", **options})


def test_load_and_export_refuse_invalid_input():
    with pytest.raises(UsageError, match=r"^checkpoint: expected int or 'best' or None, got '256' \(str\)\.$"):
        rlframe.load("nowhere", "256")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^run_dir: expected str, got b'nowhere' \(bytes\)\.$"):
        rlframe.load(b"nowhere")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^file: expected str, got 3 \(int\)\.$"):
        rlframe.export("nowhere", 3)  # type: ignore[arg-type]
