"""The Learner: updates, versions, publishing, checkpoints, and what stops it."""

from __future__ import annotations

import numpy as np
import pytest

from rlframe.errors import CheckpointError, NonFiniteLossError, UsageError
from rlframe.learners import Learner, LearnerConfig
from tests.fakes import RecordingBuffer, counting_agent, reward_batch


def make(tmp_path=None, buffer=None, **config) -> Learner:
    learner_config = LearnerConfig(checkpoint_dir=str(tmp_path) if tmp_path else None)
    return Learner(learner_config, counting_agent(**config), buffer or RecordingBuffer())


def test_a_step_without_a_batch_does_nothing():
    learner = make()
    assert learner.step(None) is None
    assert learner.learner_steps == 0 and learner.params_version == 1


def test_a_step_updates_the_parameters_and_publishes_a_new_version():
    learner = make()
    logs = learner.step(reward_batch([1, 1, 1, 1]))
    version, params = learner.get_params()
    assert float(logs["loss"]) == 1.0
    assert version == 2 and params["w"] == 0.5


def test_a_caller_that_is_up_to_date_is_told_so_and_sent_nothing():
    learner = make()
    version, _ = learner.get_params()
    assert learner.get_params(version) == (version, None)


def test_what_was_published_stays_as_it_was_when_the_learner_goes_on():
    learner = make()
    learner.step(reward_batch([1, 1, 1, 1]))
    _, before = learner.get_params()
    for _ in range(3):
        learner.step(reward_batch([9, 9, 9, 9]))
    assert before["w"] == 0.5
    assert learner.get_params()[1]["w"] > 5


def test_parameters_are_fetched_once_per_version_however_many_ask():
    learner = make()
    assert learner.get_params()[1]["w"] is learner.get_params()[1]["w"]


def test_staleness_is_the_mean_age_of_the_items_in_versions():
    learner = make()
    for _ in range(4):
        learner.step(reward_batch([1, 1, 1, 1], versions=1))
    assert learner.step(reward_batch([1, 1, 1, 1], versions=2))["staleness"] == 3.0


def test_priorities_go_back_to_the_buffer_with_the_batchs_keys():
    buffer = RecordingBuffer()
    logs = make(buffer=buffer, prioritised=True).step(reward_batch([1, -2, 3, 0]))
    ((keys, priorities),) = buffer.priorities
    np.testing.assert_array_equal(priorities, [1, 2, 3, 0])
    np.testing.assert_array_equal(keys[:, 2], [0, 1, 2, 3])
    assert "priorities" not in logs


def test_a_loss_that_is_not_finite_stops_with_step_batch_and_last_good_checkpoint(tmp_path):
    learner = make(tmp_path)
    learner.step(reward_batch([1, 1, 1, 1]))
    learner.save()
    learner.step(reward_batch([1, np.nan, 1, 1]))
    with pytest.raises(NonFiniteLossError, match=r"learner step 2 is nan, on a batch of 4 items.*checkpoint is .*1\."):
        learner.step(reward_batch([1, 1, 1, 1]))
    learner.close()


def test_a_loss_that_is_not_finite_is_noticed_before_its_priorities_reach_the_buffer():
    buffer = RecordingBuffer()
    learner = make(buffer=buffer, prioritised=True)
    with pytest.raises(NonFiniteLossError, match="learner step 1 is nan"):
        learner.step(reward_batch([1, np.nan, 1, 1]))
    assert buffer.priorities == []


def test_parameters_that_are_not_finite_are_never_saved(tmp_path):
    learner = make(tmp_path)
    learner.step(reward_batch([1, 1, 1, 1]))
    learner.save()
    learner.step(reward_batch([np.inf] * 4))
    with pytest.raises(NonFiniteLossError):
        learner.save()
    with pytest.raises(NonFiniteLossError, match="'w'"):
        learner.save()
    assert [path.name for path in tmp_path.iterdir() if path.name.isdigit()] == ["1"]
    learner.close()


def test_a_restored_learner_goes_on_as_if_it_had_not_stopped(tmp_path):
    learner, twin = make(tmp_path), make()
    for batch in ([1, 2, 3, 4], [5, 6, 7, 8]):
        learner.step(reward_batch(batch))
        twin.step(reward_batch(batch))
    learner.save(extras={"note": 1}, final=True)
    learner.close()
    resumed = make(tmp_path)
    assert resumed.restore() == {"note": 1}
    for each in (resumed, twin):
        each.step(reward_batch([9, 9, 9, 9]))
    assert resumed.get_params()[1]["w"] == twin.get_params()[1]["w"]
    assert (resumed.learner_steps, resumed.params_version) == (twin.learner_steps, twin.params_version)
    resumed.close()


def test_versions_go_on_past_what_a_crashed_learner_published(tmp_path):
    learner = make(tmp_path)
    learner.step(reward_batch([1, 1, 1, 1]))
    learner.save()
    for _ in range(5):
        learner.step(reward_batch([1, 1, 1, 1]))
    published = learner.params_version
    learner.close()
    resumed = make(tmp_path)
    resumed.restore()
    assert resumed.params_version > published
    resumed.close()


def test_restore_without_a_checkpoint_says_so(tmp_path):
    learner = make(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        learner.restore()


def test_saving_without_a_directory_is_refused():
    with pytest.raises(UsageError, match="checkpoint_dir"):
        make().save()


def test_run_learns_from_the_buffers_dataset_logs_and_saves(tmp_path):
    class Dataset:
        closed = False

        def __iter__(self):
            return self

        def __next__(self):
            return reward_batch([1, 1, 1, 1])

        def close(self):
            self.closed = True

    class Logger:
        def write(self, step, values):
            rows.append((step, float(values["loss"])))

    rows = []
    buffer = RecordingBuffer()
    dataset = buffer.dataset = Dataset()
    buffer.make_dataset = lambda: dataset
    config = LearnerConfig(max_learner_steps=4, checkpoint_dir=str(tmp_path), checkpoint_every=3, log_every=2)
    learner = Learner(config, counting_agent(), buffer, Logger())
    learner.run()
    assert learner.learner_steps == 4 and dataset.closed
    assert rows == [(2, 0.25), (4, 0.015625)]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.isdigit()) == ["3", "4"]
    learner.close()
