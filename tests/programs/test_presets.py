from __future__ import annotations

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

import rlframe
from rlframe.agents.dqn_heads import Categories
from rlframe.errors import UsageError
from rlframe.programs.experiment import Experiment
from rlframe.programs.options import registry
from rlframe.programs.options.make_experiment import apply_preset, make_experiment, option_value
from rlframe.programs.presets import PRESETS, find_preset
from rlframe.programs.topologies.makers import make_agent
from rlframe.programs.training.updates import check_updates, steps_until_first_update, total_learner_steps
from tests.agents.batches import BOX, DISCRETE, IMAGE, VECTOR


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_every_preset_sets_its_values_and_names_its_sources(preset):
    experiment = apply_preset(preset, preset.agent, preset.envs[0])
    for option, setting in preset.fields.items():
        assert option_value(experiment, option.removeprefix("agent.")) == setting.value
    assert all(len(setting.source) > 5 for setting in preset.fields.values())


@pytest.mark.parametrize(
    ("name", "field", "value", "text"),
    [
        ("ppo/mujoco", "normalize_rewards", True, "which updates the statistics in each step; here"),
        ("ppo/acrobot", "agent.unroll_length", 256, "without its normalization of observations and rewards"),
        ("ppo/mountain_car", "agent.unroll_length", 16, "without its normalization of observations and rewards"),
        ("ppo/pendulum", "steps", 300_000, "which uses gSDE exploration"),
        *((f"ppo/{env}", "agent.value_cost", 0.5, "0.5 is for the full") for env in ("cartpole", "acrobot")),
        *((f"ppo/{env}", "agent.value_cost", 0.5, "0.5 is for the full") for env in ("mountain_car", "pendulum")),
        ("dqn/atari", "agent.head.huber_threshold", 1.0, "CleanRL does not clip them"),
        ("dqn/atari", "agent.epsilon", "linear:1:0.01@250000", "which counts from the start of the run"),
        ("sac/mujoco", "agent.min_log_std", -5.0, "which scales a tanh to these bounds; here the value is clipped"),
    ],
)
def test_preset_documents_differences_from_its_source(name, field, value, text):
    (preset,) = (preset for preset in PRESETS if preset.name == name)
    assert preset.fields[field].value == value and text in preset.fields[field].source


@pytest.mark.parametrize(
    ("agent", "env", "name"),
    [
        ("ppo", "CartPole-v1", "ppo/cartpole"),
        ("ppo", "gymnasium:CartPole-v1", "ppo/cartpole"),
        ("ppo", "jax:CartPole-v1", "ppo/cartpole"),
        ("ppo", "gymnax:Asterix-MinAtar", "ppo/minatar"),
        ("pqn", "jax:Breakout-MinAtar", "pqn/minatar"),
        ("dqn", "jax:Breakout-MinAtar", "dqn/general"),
        ("ppo", "Pong-v5", "ppo/atari"),
        ("ppo", "ALE/Breakout-v5", "ppo/atari"),
        ("ppo", "HalfCheetah-v5", "ppo/mujoco"),
        ("ppo", "LunarLander-v3", "ppo/lunar_lander"),
        ("ppo", "LunarLanderContinuous-v3", "ppo/general"),
        ("dqn", "MountainCar-v0", "dqn/mountain_car"),
        ("dqn", "Breakout-v5", "dqn/atari"),
        ("dqn", "HalfCheetah-v5", "dqn/general"),
        ("impala", "CartPole-v1", "impala/cartpole"),
        ("impala", "Pong-v5", "impala/atari"),
        ("impala", "HalfCheetah-v5", "impala/general"),
        ("pqn", "CartPole-v1", "pqn/cartpole"),
        ("r2d2", "PositionOnlyCartPole-v1", "r2d2/position_only_cartpole"),
        ("r2d2", "CartPole-v1", "r2d2/general"),
        ("sac", "Pendulum-v1", "sac/pendulum"),
        ("sac", "gymnasium:HalfCheetah-v4", "sac/mujoco"),
        ("sac", "dm_control:cheetah-run", "sac/general"),
        ("td3", "file.py:MyEnv", "td3/general"),
        ("pqn", "MyOwn-v0", "pqn/general"),
        ("td3", "Pendulum-v1", "td3/pendulum"),
        ("td3", "Hopper-v4", "td3/mujoco"),
        ("grpo", "examples/llm/reverse.py:Reverse", "grpo/reverse"),
        ("grpo", "examples/llm/guess.py:Guess", "grpo/guess"),
        ("grpo", "examples/llm/calculator.py:Calculator", None),
        ("ppo", "MyOwn-v0", "ppo/general"),
        ("file.py:Mine", "CartPole-v1", None),
    ],
)
def test_auto_preset_depends_on_agent_and_environment(agent, env, name):
    found = find_preset("auto", agent, env)
    assert (found.name if found is not None else None) == name


def test_at_most_one_automatic_preset_fits_an_agent_and_an_environment():
    for env in ("CartPole-v1", "Pong-v5", "Ant-v4", "Pendulum-v1", "MountainCar-v0", "Acrobot-v1", "Breakout-MinAtar"):
        for agent in registry.AGENTS:
            assert (
                len([each for each in PRESETS if each.agent == agent and each.automatic and each.fits(env)])
                <= 1 + (agent != "grpo")  # the general preset fits every environment, and is the last
            )


def test_preset_none_gives_default_values():
    assert find_preset("none", "ppo", "CartPole-v1") is None
    config_cls = registry.agent_class("ppo").config_cls
    assert make_experiment("ppo", "CartPole-v1", preset="none").agent_config == config_cls()


def test_preset_by_name_works_for_another_environment():
    assert find_preset("ppo/cartpole", "ppo", "Acrobot-v1").name == "ppo/cartpole"


def test_preset_sets_no_envpool_options_for_a_users_environment(monkeypatch):
    assert make_experiment("dqn", "Breakout-v5").env_kwargs["episodic_life"]
    monkeypatch.setitem(gymnasium.envs.registration.registry, "Breakout-v5", EnvSpec("Breakout-v5", "my_envs:Breakout"))
    users = make_experiment("dqn", "Breakout-v5")
    assert users.env_kwargs == {} and users.topology_config.eval_env_kwargs == {}
    assert make_experiment("dqn", "envpool:Breakout-v5").env_kwargs["episodic_life"]
    assert users.agent_config == make_experiment("dqn", "Pong-v5").agent_config


def test_rainbow_preset_turns_on_all_dqn_extensions():
    assert find_preset("auto", "dqn", "Pong-v5").name == "dqn/atari"
    experiment = make_experiment("dqn", "Pong-v5", preset="dqn/rainbow_atari")
    cfg, network = experiment.agent_config, experiment.topology_config.network_config
    assert (cfg.double, cfg.prioritized, cfg.n_step, cfg.head) == (True, True, 3, Categories(51, -10.0, 10.0))
    assert (network.dueling, network.noisy) == (True, 0.5)
    assert cfg.epsilon == 0.0


def test_unknown_preset_suggests_the_closest_name():
    with pytest.raises(UsageError, match="Did you mean 'ppo/cartpole'"):
        find_preset("ppo/cart_pole", "ppo", "CartPole-v1")


def test_options_of_the_user_override_the_preset():
    experiment = make_experiment("ppo", "CartPole-v1", num_envs=3, learning_rate=0.5)
    preset = find_preset("auto", "ppo", "CartPole-v1")
    assert experiment.num_envs == 3
    assert experiment.agent_config.learning_rate == 0.5
    assert experiment.agent_config.unroll_length == preset.options["unroll_length"]


def test_misspelled_option_is_refused():
    with pytest.raises(UsageError, match="Did you mean 'learning_rate'"):
        make_experiment("ppo", "CartPole-v1", learning_rat=0.5)


@pytest.mark.parametrize(
    ("agent", "network", "observation", "action"),
    [
        ("dqn", "mlp", VECTOR, DISCRETE),
        pytest.param("pqn", "mlp", VECTOR, DISCRETE, marks=pytest.mark.system),
        pytest.param("pqn", "nature_cnn", IMAGE, DISCRETE, marks=pytest.mark.system),
        ("r2d2", "lstm", VECTOR, DISCRETE),
        ("impala", "nature_cnn", IMAGE, DISCRETE),
        ("sac", "mlp", VECTOR, BOX),
        pytest.param("td3", "mlp", VECTOR, BOX, marks=pytest.mark.system),
    ],
)
def test_network_by_name_has_the_same_initial_params_as_the_default(agent, network, observation, action):
    config = make_experiment(agent, preset="none", network=network).topology_config.network_config
    cls = registry.agent_class(agent)
    by_name, by_default = (cls(cls.config_cls(), observation, action, each) for each in (config, None))
    drawn = [each.initial_params(jax.random.PRNGKey(0)) for each in (by_name, by_default)]
    jax.tree.map(np.testing.assert_array_equal, *drawn)
    assert getattr(config, "activation", "relu") == "relu"


def test_option_network_none_removes_the_network_of_the_preset():
    experiment = make_experiment("dqn", "CartPole-v1", network=None)
    assert experiment.topology_config.network is None and experiment.topology_config.network_config is None
    assert experiment.env == Experiment().env


def test_subclass_of_an_agent_accepts_its_preset_by_name(tmp_path):
    (tmp_path / "own.py").write_text("from rlframe.agents import PPO\nclass Own(PPO): pass\n")
    own = f"{tmp_path / 'own.py'}:Own"
    assert find_preset("auto", own, "CartPole-v1") is None
    assert find_preset("ppo/cartpole", own, "CartPole-v1").name == "ppo/cartpole"
    with pytest.raises(UsageError, match="There is no preset 'dqn/cartpole' for"):
        find_preset("dqn/cartpole", own, "CartPole-v1")


MYSELF = """
import gymnasium
import numpy as np

class Maze(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (3,), np.float32)
    action_space = gymnasium.spaces.{action}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {{}}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {{}}
"""


@pytest.mark.parametrize("agent", sorted({*registry.AGENTS} - {"grpo"}))
def test_short_run_of_an_unknown_environment_makes_many_updates(agent, tmp_path):
    action = "Box(-1.0, 1.0, (2,))" if agent in ("sac", "td3") else "Discrete(2)"
    (tmp_path / "maze.py").write_text(MYSELF.format(action=action))
    experiment = make_experiment(agent, f"{tmp_path}/maze.py:Maze", steps=20_000)
    made = make_agent(experiment)
    assert total_learner_steps(made.replay_spec, 20_000, experiment.num_envs) >= 19
    assert steps_until_first_update(made.replay_spec, experiment.num_envs) <= 2_500
    assert check_updates(experiment, made)


def test_run_with_a_general_preset_says_so_in_one_line(tmp_path, capsys):
    (tmp_path / "maze.py").write_text(MYSELF.format(action="Discrete(2)"))
    options = {"steps": 2, "until_learner_steps": 1, "eval_episodes": 0}
    with pytest.raises(UsageError, match="would make no update"):
        rlframe.train("ppo", f"{tmp_path}/maze.py:Maze", run_dir=tmp_path / "run", **options)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "general" in line)
    assert line == (
        "The preset ppo/general has general values, for environments without a preset. To turn it off: --preset none."
    )
