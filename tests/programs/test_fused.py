"""The topology fused: it is the same algorithm as single_process, and it continues exactly after a stop."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import psutil
import pytest

from rlframe.device import driver
from rlframe.device.ring import StepRing
from rlframe.errors import NonFiniteLossError, UsageError
from rlframe.metrics.files import read_jsonl
from rlframe.programs import evaluate, make_experiment, run_experiment
from rlframe.replay.tables import UniformTable
from tests.programs.test_single_process import LOGS_AN_ARRAY, saved_arrays

SMALL = {"network": "mlp", "network.hidden": (16,)}
PPO = {"unroll_length": 8, "num_minibatches": 2, "num_epochs": 2, **SMALL}
DQN = {"batch_size": 16, "min_replay_size": 40, "n_step": 3, "update_period": 4, **SMALL}
R2D2 = {"batch_size": 8, "sequence_length": 8, "burn_in": 4, "period": 4, "min_replay_size": 20, "update_period": 8}
R2D2 |= {"network": "gru", "network.hidden": (8,), "env": "jax:PositionOnlyCartPole-v1"}
EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
AGENT, ENV = f"{EXAMPLES}/custom_agent.py:Reinforce", f"{EXAMPLES}/jax_environment.py:Target"


def experiment(agent, topology="fused", env="jax:CartPole-v1", **options):
    values = {"num_envs": 4, "seed": 3, "eval_episodes": 0, "steps": 100_000, **options}
    return make_experiment(agent, env, topology=topology, **values)


def largest_difference(run_dir, other) -> float:
    """Return the largest difference between the arrays of the last checkpoints of two runs."""
    arrays, others = saved_arrays(run_dir), saved_arrays(other)
    assert len(arrays) == len(others) > 5
    pairs = zip(arrays, others, strict=True)
    return max(float(np.abs(one.astype(np.float64) - two).max(initial=0.0)) for one, two in pairs)


@pytest.mark.parametrize(
    ("agent", "options"),
    [
        ("ppo", PPO),
        pytest.param(AGENT, {"env": ENV, "unroll_length": 8}, marks=pytest.mark.system),
        pytest.param("impala", {"unroll_length": 8, "batch_size": 6, **SMALL}, marks=pytest.mark.system),
        pytest.param("pqn", PPO, marks=pytest.mark.system),
        pytest.param(
            "ppo",
            {
                "unroll_length": 8,
                "num_minibatches": 2,
                "network": "gru",
                "network.hidden": (16,),
                "normalize_observations": True,
                "normalize_rewards": True,
                "frame_stack": 2,
                "action_repeat": 2,
                "clip_rewards": 0.5,
                "env": "jax:PositionOnlyCartPole-v1",
            },
            marks=pytest.mark.system,
        ),
        pytest.param(
            "ppo",  # with convolutions, the parts of a round are jitted separately
            {
                "unroll_length": 8,
                "num_minibatches": 2,
                "num_epochs": 2,
                "env": "jax:Breakout-MinAtar",
                "network": "nature_cnn",
                "network.channels": (4,),
                "network.kernels": (3,),
                "network.strides": (1,),
                "network.hidden": (16,),
            },
            marks=pytest.mark.system,
        ),
    ],
    ids=["ppo", "examples", "impala", "pqn", "recurrent ppo with wrappers", "ppo with images"],
)
def test_fused_training_gives_the_same_parameters_as_a_single_process(agent, options, tmp_path):
    for topology in ("fused", "single_process"):
        result = run_experiment(
            experiment(agent, topology, until_learner_steps=20, **options), run_dir=tmp_path / topology
        )
        assert result.learner_steps == 20 and result.params_version == 21
    assert largest_difference(tmp_path / "fused", tmp_path / "single_process") < 1e-5


@pytest.mark.system
def test_examples_run_in_a_program_of_several_processes(tmp_path):
    values = experiment(AGENT, "heavy_env", ENV, num_actors=2, steps=2000, eval_episodes=2)
    result = run_experiment(values, run_dir=tmp_path / "run")
    assert result.learner_steps > 5 and result.episodes == 2
    assert evaluate(tmp_path / "run", episodes=2)["return_mean"] == result.return_mean


PENDULUM = {"env": "jax:Pendulum-v1", "batch_size": 16, "min_replay_size": 40, **SMALL}


@pytest.mark.system
@pytest.mark.parametrize(
    ("agent", "options"),
    [
        ("dqn", DQN),
        ("sac", PENDULUM),
        ("td3", {**PENDULUM, "normalize_observations": True}),
    ],
    ids=["dqn", "sac", "normalized td3"],
)
def test_replay_agents_learn_the_same_from_the_same_items(agent, options, tmp_path, monkeypatch):
    drawn = []

    def record(times, envs) -> None:
        drawn.append(np.asarray(times, np.int64) * 4 + np.asarray(envs))  # the number of a timestep on the host

    def draw_and_record(ring, rng, state):
        result = draw(ring, rng, state)
        jax.debug.callback(record, *result[2], ordered=True)
        return result

    draw = StepRing.draw
    monkeypatch.setattr(StepRing, "draw", draw_and_record)
    monkeypatch.setattr(
        UniformTable, "draw", lambda table, count, rng: (drawn.pop(0), np.full(count, 1 / table.size, np.float32))
    )
    steps = []
    for topology in ("fused", "single_process"):
        values = experiment(agent, topology, until_learner_steps=20, **options)
        steps.append(run_experiment(values, run_dir=tmp_path / topology).env_steps)
    assert not drawn and steps[0] == steps[1]
    assert largest_difference(tmp_path / "fused", tmp_path / "single_process") < 1e-5


@pytest.mark.system
@pytest.mark.parametrize(
    ("agent", "options"),
    [
        ("ppo", PPO),
        ("dqn", {**DQN, "prioritized": True}),
        ("impala", {"unroll_length": 8, "batch_size": 6, **SMALL}),
        ("r2d2", R2D2),
    ],
    ids=["ppo", "prioritized dqn", "impala", "r2d2"],
)
def test_resumed_run_equals_an_uninterrupted_run(agent, options, tmp_path):
    values = experiment(agent, **{**options, "steps": 1200, "eval_episodes": 2})
    whole = run_experiment(values, run_dir=tmp_path / "whole")
    stopped = run_experiment(values, run_dir=tmp_path / "stopped", stop_at=500)
    assert 500 <= stopped.env_steps < 540 and stopped.learner_steps < whole.learner_steps
    resumed = run_experiment(values, run_dir=tmp_path / "stopped", resume=True)
    assert largest_difference(tmp_path / "whole", tmp_path / "stopped") == 0.0
    assert (resumed.env_steps, resumed.episodes, resumed.return_mean) == (whole.env_steps, 2, whole.return_mean)


@pytest.mark.system
@pytest.mark.parametrize("topology", ["fused", "single_process"])
def test_session_that_ends_between_two_updates_of_a_step_is_continued_exactly(topology, tmp_path):
    options = {**DQN, "n_step": 1, "update_period": 1}  # 4 updates per step
    first, next_one, last = (experiment("dqn", topology, until_learner_steps=n, **options) for n in (21, 22, 40))
    expected = run_experiment(last, run_dir=tmp_path / "whole")
    stopped = run_experiment(first, run_dir=tmp_path / "stopped")
    resumed = run_experiment(next_one, run_dir=tmp_path / "stopped", resume=True)
    assert (stopped.learner_steps, resumed.learner_steps) == (21, 22) and resumed.env_steps == stopped.env_steps
    resumed = run_experiment(last, run_dir=tmp_path / "stopped", resume=True)
    assert (resumed.env_steps, resumed.learner_steps) == (expected.env_steps, 40)
    assert largest_difference(tmp_path / "whole", tmp_path / "stopped") == 0.0


@pytest.mark.system
def test_agent_whose_update_is_not_jitted_learns_the_same(tmp_path):
    (tmp_path / "agent.py").write_text(
        pathlib.Path(AGENT.partition(":")[0]).read_text()
        + "\n\nclass InPython(Reinforce):\n    jit_learner_step = False\n"
    )
    for name, agent in (("jitted", AGENT), ("not", f"{tmp_path}/agent.py:InPython")):
        values = experiment(agent, env=ENV, unroll_length=8, until_learner_steps=3)
        assert run_experiment(values, run_dir=tmp_path / name).learner_steps == 3
    assert largest_difference(tmp_path / "jitted", tmp_path / "not") < 1e-5


@pytest.mark.system
def test_results_do_not_depend_on_the_number_of_rounds_per_call(tmp_path, monkeypatch):
    values = experiment("dqn", **{**DQN, "steps": 1200})
    run_experiment(values, run_dir=tmp_path / "long")
    monkeypatch.setattr(driver, "_CALL_SECONDS", 0.0)  # one round per call
    run_experiment(values, run_dir=tmp_path / "short")
    assert largest_difference(tmp_path / "long", tmp_path / "short") == 0.0


@pytest.mark.system
def test_rows_evaluations_and_checkpoints_are_made_at_their_steps(tmp_path):
    values = experiment("ppo", **{**PPO, "steps": 1000, "log_every": 200, "eval_every": 500, "eval_episodes": 2})
    result = run_experiment(values, run_dir=tmp_path / "run")
    rows = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    training = [row for row in rows if "steps_per_second" in row]
    assert [row["step"] // 200 for row in training] == [1, 2, 3, 4, 5]
    assert [row["step"] // 500 for row in rows if "return_mean" in row] == [1, 2]
    assert {"loss", "entropy", "episode_return", "learner_steps", "replay_items"} <= set(training[1])
    assert training[-1]["learner_steps"] == result.learner_steps
    assert 1000 <= result.env_steps < 1000 + 32


@pytest.mark.system
def test_live_arrays_and_memory_do_not_grow(tmp_path):
    seen = []

    def note(info) -> None:
        seen.append((len(jax.live_arrays()), psutil.Process().memory_info().rss))

    values = experiment("dqn", **{**DQN, "steps": 6000, "log_every": 500})
    run_experiment(values, run_dir=tmp_path / "run", callbacks=[note])
    assert seen[-2][0] <= seen[2][0]
    assert seen[-2][1] < seen[2][1] + 20 * 2**20


@pytest.mark.system
def test_error_of_an_update_that_is_not_finite_names_the_first_one(tmp_path, monkeypatch):
    from rlframe.agents import PPO as PPOAgent

    apply = PPOAgent.apply_gradients

    def diverge(agent, params, grads, learner_state):
        params, opt_state, logs = apply(agent, params, grads, learner_state)
        is_late = learner_state.steps >= 7
        return jax.tree.map(lambda leaf: leaf * jax.numpy.where(is_late, jax.numpy.nan, 1.0), params), opt_state, logs

    monkeypatch.setattr(PPOAgent, "apply_gradients", diverge)
    with pytest.raises(NonFiniteLossError, match="after learner step 8|loss of learner step 8"):
        run_experiment(experiment("ppo", **{**PPO, "steps": 2000}), run_dir=tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"env": "CartPole-v1"},
            "needs a JAX environment, such as jax:CartPole-v1 or file.py:Class, got 'CartPole-v1'",
        ),
        ({"num_workers": 2}, "leave num_workers out"),
        ({"async_envs": True, "agent": "impala"}, "cannot be asynchronous"),
        ({"env_type": "thread"}, "is a JAX environment: use type 'jax'"),
        ({"replay": "reverb"}, "The topology fused needs replay=local"),
    ],
)
def test_options_that_fused_cannot_use_are_refused(options, message, tmp_path):
    with pytest.raises(UsageError, match=message):
        run_experiment(experiment(**{"agent": "ppo", **SMALL, **options}), run_dir=tmp_path / "run")


def test_replay_that_does_not_fit_into_memory_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"The replay needs \d+.\d GiB of device memory, .* Lower --replay-capacity"):
        run_experiment(experiment("dqn", **{**DQN, "replay_capacity": 10**9}), run_dir=tmp_path / "run")


@pytest.mark.system
def test_agent_that_logs_an_array_is_refused(tmp_path):
    (tmp_path / "agent.py").write_text(LOGS_AN_ARRAY)
    with pytest.raises(UsageError, match=r"logs 'td_errors' as float32 of shape \(8,\); a log is one number"):
        run_experiment(
            experiment(f"{tmp_path}/agent.py:Logs", min_replay_size=50, batch_size=8), run_dir=tmp_path / "run"
        )


COUNTER = """
import jax.numpy as jnp, numpy as np
from dm_env import specs

class Counter:
    observation_space = specs.Array((1,), np.float32, "observation")
    action_space = specs.DiscreteArray(2, np.int32, "action")

    def __init__(self, length=3):
        self.length = length

    def reset(self, rng):
        return jnp.zeros((), jnp.int32), jnp.zeros(1)

    def step(self, rng, state, action):
        state = state + 1
        return state, state[None].astype(jnp.float32), 1.0, False, state >= self.length
"""


@pytest.mark.system
def test_environment_of_a_user_trains_and_truncation_bootstraps(tmp_path):
    """Every reward is 1, so the value is 1 / (1 - 0.5) = 2. If truncation ended the rewards, the mean would be 1.42."""
    (tmp_path / "counter.py").write_text(COUNTER)
    options = {"discount": 0.5, "learning_rate": 0.01, "epsilon": 0.2, "min_replay_size": 50, "batch_size": 32}
    options |= {"target_update_period": 20, "update_period": 1, "n_step": 1}
    values = experiment("dqn", env=f"{tmp_path}/counter.py:Counter", **{**options, **SMALL, "steps": 2500})
    run_experiment(values, run_dir=tmp_path / "run")
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl")[-1]["value"] == pytest.approx(2.0, abs=0.2)
