from __future__ import annotations

import json

import pytest

from rlframe.errors import UsageError
from rlframe.programs.options.make_experiment import make_experiment
from rlframe.programs.options.saved_experiment import last_values, load_experiment, resume_experiment, save_experiment
from rlframe.programs.session import Session
from rlframe.programs.topologies.config import EnvOptions
from rlframe.programs.topologies.heavy_env import HeavyEnv
from rlframe.programs.topologies.makers import learner_config, make_agent
from rlframe.programs.training.updates import total_learner_steps
from rlframe.types import ReplaySpec, Sequence, Transition


def test_options_of_a_topology_cannot_be_read_as_another_class():
    experiment = make_experiment("ppo", "CartPole-v1", frame_stack=2)
    assert EnvOptions.of(experiment).frame_stack == 2
    with pytest.raises(AssertionError, match="The options of single_process are not a HeavyEnv"):
        HeavyEnv.of(experiment)


def test_experiment_is_equal_after_save_and_load(tmp_path):
    experiment = make_experiment(
        "dqn", "Acrobot-v1", seed=7, env_kwargs={"a": 1}, learning_rate=0.125, eval_every=500, double=True
    )
    save_experiment(experiment, tmp_path / "config.json", {"preset": "x"})
    assert load_experiment(tmp_path / "config.json") == experiment
    assert load_experiment(tmp_path) == experiment


def test_config_json_stores_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text("")
    save_experiment(make_experiment("ppo", "env.py:make"), tmp_path / "config.json", {})
    assert load_experiment(tmp_path).env == f"{tmp_path}/env.py:make"
    grpo = make_experiment("grpo", weights="model", tokenizer="words/tokenizer.json")
    monkeypatch.chdir("/")  # because an environment can change the working directory
    assert grpo.agent_config.weights == f"{tmp_path}/model"
    assert grpo.topology_config.tokenizer == f"{tmp_path}/words/tokenizer.json"
    assert make_experiment("grpo", tokenizer="byte").topology_config.tokenizer == "byte"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "is not the config of a run"),
        ('{"experiment": {"sead": 1}}', "Did you mean 'seed'"),
        ('{"experiment": {"agent_config": {"learning_rat": 1}}}', "Did you mean 'learning_rate'"),
        ('{"experiment": {"steps": "many"}}', "experiment.steps: expected int, got 'many'"),
    ],
)
def test_damaged_config_raises_a_clear_error(tmp_path, content, message):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=message):
        load_experiment(tmp_path)


def test_missing_config_raises_a_clear_error(tmp_path):
    with pytest.raises(UsageError, match="Cannot read .*config.json: No such file or directory"):
        load_experiment(tmp_path / "config.json")


@pytest.mark.parametrize("field", ["steps", "num_envs", "eval_num_envs", "eval_max_episode_length"])
def test_value_below_one_is_refused_for_options_that_are_counts(field):
    with pytest.raises(UsageError, match=f"{field} must be at least 1, got 0"):
        make_experiment(**{field: 0})


@pytest.mark.parametrize("field", ["observation_clip", "reward_clip", "clip_rewards", "answer_timeout"])
def test_negative_limits_are_refused_even_if_unused(field):
    with pytest.raises(UsageError, match=f"{field} must be above 0, got -1.0"):
        make_experiment(**{field: -1.0})


@pytest.mark.parametrize(
    ("field", "value", "topology", "others"),
    [
        ("num_actors", 4, "single_process", "heavy_env or light_env or distributed or elastic"),
        ("engine", "threads", "single_process", "heavy_env or light_env or distributed or elastic"),
        ("max_restarts", 0, "single_process", "heavy_env or light_env or distributed or elastic"),
        ("max_actors", 4, "heavy_env", "elastic"),
        ("min_actors", 2, "distributed", "elastic"),
        ("mean_staleness", 2.0, "light_env", "elastic"),
        ("num_inferencers", 2, "heavy_env", "light_env or distributed"),
        ("num_pools", 2, "heavy_env", "light_env or distributed"),
        ("replay_checkpoint_every", 1_000, "distributed", "single_process"),
    ],
)
def test_option_that_the_topology_does_not_read_is_refused(field, value, topology, others):
    with pytest.raises(UsageError, match=f"^{field}={value!r} is for the topology {others}: {topology} does not use"):
        make_experiment(topology=topology, **{field: value})
    assert getattr(make_experiment(topology=others.split()[0], **{field: value}).topology_config, field) == value


def test_max_restarts_is_refused_for_the_threads_engine():
    with pytest.raises(UsageError, match="max_restarts=1 is for the engine launchpad or local"):
        make_experiment(topology="heavy_env", engine="threads", max_restarts=1)


def test_learner_of_a_program_saves_every_30_seconds_by_default(tmp_path):
    experiment = make_experiment("impala", topology="heavy_env", checkpoint_every=0)
    session = Session(experiment, make_agent(experiment), tmp_path, until=experiment.steps, began=0.0)
    assert learner_config(session).checkpoint_seconds == 30.0


def test_run_with_a_queue_makes_one_update_per_batch_of_unrolls():
    spec = ReplaySpec("queue", Sequence(32), batch_size=None, capacity=512)
    assert total_learner_steps(spec, steps=100_000, num_envs=8) == 100_000 // (32 * 8)


def test_steps_before_min_size_cause_no_updates():
    spec = ReplaySpec("uniform", Transition(1), batch_size=64, capacity=10_000, min_size=1_000, samples_per_insert=32.0)
    assert total_learner_steps(spec, steps=101_000, num_envs=8) == 50_000


def test_total_learner_steps_is_at_least_one():
    spec = ReplaySpec("uniform", Transition(1), batch_size=64, capacity=10_000, min_size=1_000, samples_per_insert=1.0)
    assert total_learner_steps(spec, steps=500, num_envs=1) == 1


def test_schedules_of_a_resumed_run_end_at_the_last_step_of_its_first_session():
    saved = make_experiment("ppo", steps=1000)
    longer = resume_experiment(saved, make_experiment("ppo", steps=3000))
    assert (longer.steps, longer.schedule_steps) == (3000, 1000)
    again = resume_experiment(longer, make_experiment("ppo", steps=5000))
    assert (again.steps, again.schedule_steps) == (5000, 1000)
    with pytest.raises(UsageError, match="end at step 1000; a resumed run cannot change this to schedule_steps = 4000"):
        resume_experiment(longer, make_experiment("ppo", steps=5000, schedule_steps=4000))


def test_last_values_of_schedules_that_have_ended():
    options = {"preset": "none", "learning_rate": "linear:1e-3:1e-4"}
    saved = make_experiment("ppo", steps=1000, **options)
    longer = resume_experiment(saved, make_experiment("ppo", steps=3000, **options))
    assert last_values(saved) == {}
    assert last_values(longer) == {"learning_rate": 1e-4}


def test_resume_without_changes_gives_an_equal_experiment():
    saved = make_experiment("ppo", steps=1000)
    assert resume_experiment(saved, saved) == saved  # so that a plot shows them as one group


def test_resumed_run_cannot_change_seed_or_learning_rate():
    saved = make_experiment("ppo")
    with pytest.raises(UsageError, match="started with seed = 1; a resumed run cannot change it to 2"):
        resume_experiment(saved, make_experiment("ppo", seed=2))
    with pytest.raises(UsageError, match=r"started with learning_rate = 'linear:1e-3:0'"):
        resume_experiment(saved, make_experiment("ppo", learning_rate=0.5))


def test_config_json_contains_notes_and_plain_values(tmp_path):
    save_experiment(make_experiment("ppo"), tmp_path / "config.json", {"preset": "ppo/cartpole"})
    content = json.loads((tmp_path / "config.json").read_text())
    assert content["notes"] == {"preset": "ppo/cartpole"}
    assert content["experiment"]["agent_config"]["learning_rate"] == "linear:1e-3:0"
