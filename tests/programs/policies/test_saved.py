"""Before an evaluation during a run, the learner writes a checkpoint with the evaluated policy."""

from __future__ import annotations

import threading
import time

import jax
import numpy as np
import pytest

from rlframe.agents.networks import MLPConfig
from rlframe.errors import CheckpointError, StoppedError
from rlframe.learners import Checkpointer, Learner, LearnerConfig
from rlframe.programs import make_experiment
from rlframe.programs.policies import saved
from rlframe.programs.policies.saved import SavedPolicy, read_checkpoint, read_policy, wait_until_saved
from rlframe.programs.run_dir.directory import RunDir
from rlframe.programs.topologies.makers import make_agent
from rlframe.replay import ReplayBuffer


@pytest.fixture()
def agent():
    return make_agent(make_experiment("dqn", network="mlp", network_config=MLPConfig((8,)), env_type="loop"))


@pytest.fixture()
def learner(agent, tmp_path):
    made = Learner(LearnerConfig(checkpoint_dir=str(tmp_path / "checkpoints")), agent, ReplayBuffer(agent))
    yield made
    made.close()


def test_evaluated_policy_is_in_a_new_checkpoint(agent, learner, tmp_path, monkeypatch):
    monkeypatch.setattr(learner, "learner_steps", 5)
    policy = SavedPolicy(agent, RunDir(tmp_path), learner)
    policy.update(threading.Event())
    assert Checkpointer(tmp_path / "checkpoints").steps() == [5]
    assert policy.version == learner.params_version
    of_checkpoint = read_policy(agent, read_checkpoint(RunDir(tmp_path), 5)).get_params()[1]
    for ours, theirs in zip(jax.tree.leaves(policy.get_params()[1]), jax.tree.leaves(of_checkpoint)):
        np.testing.assert_array_equal(ours, theirs)


def test_existing_checkpoint_is_not_written_again(agent, learner, tmp_path):
    learner.save()
    wait_until_saved(learner, tmp_path / "checkpoints", threading.Event())
    assert Checkpointer(tmp_path / "checkpoints").steps() == [0]


def test_policy_is_saved_even_before_the_first_update(agent, learner, tmp_path, caplog):
    SavedPolicy(agent, RunDir(tmp_path), learner).update(threading.Event())
    assert Checkpointer(tmp_path / "checkpoints").steps() == [0]
    assert not caplog.records


def test_wait_ends_when_a_restarted_learner_writes_a_checkpoint(agent, learner, tmp_path, monkeypatch):
    monkeypatch.setattr(learner, "learner_steps", 100)
    requests = []

    def save_soon():  # simulate a restart of the learner, which loses the request
        requests.append(learner.learner_steps)
        learner.learner_steps = 0
        learner.save()

    monkeypatch.setattr(learner, "save_soon", save_soon)
    wait_until_saved(learner, tmp_path / "checkpoints", threading.Event())
    assert requests == [100]
    assert Checkpointer(tmp_path / "checkpoints").steps() == [0]


def test_learner_that_cannot_save_is_evaluated_with_current_parameters(agent, learner, tmp_path, monkeypatch, caplog):
    def fail(*_, **__):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(learner, "learner_steps", 5)
    monkeypatch.setattr(Checkpointer, "save", fail)
    monkeypatch.setattr(saved, "_SAVE_WITHIN", 0.3)
    policy = SavedPolicy(agent, RunDir(tmp_path), learner)
    policy.update(threading.Event())
    assert policy.version == learner.params_version
    assert any("The run continues without it" in record.getMessage() for record in caplog.records)


def test_stop_event_ends_the_wait_for_a_checkpoint(agent, learner, tmp_path, monkeypatch):
    monkeypatch.setattr(learner, "save_soon", lambda: None)
    stop = threading.Event()
    stop.set()
    began = time.monotonic()
    with pytest.raises(StoppedError, match="Stopped before the policy to evaluate was saved"):
        SavedPolicy(agent, RunDir(tmp_path), learner).update(stop)
    assert time.monotonic() - began < 60.0
