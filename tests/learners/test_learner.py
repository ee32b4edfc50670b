"""Tests of the Learner: updates, versions, publishing, checkpoints, and stopping."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from rlframe import shutdown
from rlframe.actors import Actor
from rlframe.envs import SyncEnv
from rlframe.errors import CheckpointError, FencedError, NonFiniteLossError, PeerError, StoppedError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.learners import Checkpointer, DataConfig, Learner, LearnerConfig, learner_replay
from rlframe.learners.versions import VersionCounter
from rlframe.replay import ReplayBuffer, replay_files
from rlframe.replay.base import DatasetTimeoutError
from tests.fakes import (
    ACTION_SPEC,
    OBSERVATION_SPEC,
    CountingAgent,
    CountingConfig,
    CountingEnv,
    FixedParams,
    RecordingBuffer,
    counting_agent,
    reward_batch,
)
from tests.small_disk import small_disk
from tests.waiting import wait_until

__all__ = ["small_disk"]


def make(tmp_path=None, buffer=None, **config) -> Learner:
    learner_config = LearnerConfig(checkpoint_dir=str(tmp_path) if tmp_path else None)
    return Learner(learner_config, counting_agent(**config), buffer or RecordingBuffer())


def test_step_without_a_batch_does_nothing():
    learner = make()
    assert learner.step(None) is None
    assert learner.learner_steps == 0 and learner.params_version == 1


@pytest.mark.parametrize(
    ("arguments", "got"),
    [(({}, (), None), "dict, tuple, NoneType"), (({},), "dict"), ((lambda: None,), "function"), ((None, None), "None")],
)
def test_step_rejects_arguments_that_are_not_a_batch(arguments, got):
    with pytest.raises(UsageError, match=rf"got \({got}.*learner.step\(batch\).*agent.learner_step\(params"):
        make().step(*arguments)


def test_step_updates_parameters_and_publishes_a_new_version():
    learner = make()
    logs = learner.step(reward_batch([1, 1, 1, 1]))
    version, params = learner.get_params()
    assert float(logs["loss"]) == 1.0
    assert version == 2 and params["w"] == 0.5


def test_get_params_with_the_newest_version_returns_no_parameters():
    learner = make()
    version, _ = learner.get_params()
    assert learner.get_params(version) == (version, None)


def test_published_parameters_do_not_change_in_later_updates():
    learner = make()
    learner.step(reward_batch([1, 1, 1, 1]))
    _, before = learner.get_params()
    for _ in range(3):
        learner.step(reward_batch([9, 9, 9, 9]))
    assert before["w"] == 0.5
    assert learner.get_params()[1]["w"] > 5


def test_get_params_returns_the_same_arrays_for_the_same_version():
    learner = make()
    assert learner.get_params()[1]["w"] is learner.get_params()[1]["w"]


def test_staleness_is_the_mean_number_of_versions_since_the_items_were_made():
    learner = make()
    for _ in range(4):
        learner.step(reward_batch([1, 1, 1, 1], versions=1))
    assert learner.step(reward_batch([1, 1, 1, 1], versions=2))["staleness"] == 3.0


def test_step_passes_priorities_and_item_keys_to_the_buffer():
    buffer = RecordingBuffer()
    logs = make(buffer=buffer, prioritized=True).step(reward_batch([1, -2, 3, 0]))
    ((keys, priorities),) = buffer.priorities
    np.testing.assert_array_equal(priorities, [1, 2, 3, 0])
    np.testing.assert_array_equal(keys[:, 2], [0, 1, 2, 3])
    assert "priorities" not in logs


def test_non_finite_loss_error_names_step_batch_and_last_good_checkpoint(tmp_path):
    learner = make(tmp_path)
    learner.step(reward_batch([1, 1, 1, 1]))
    learner.save()
    learner.step(reward_batch([1, np.nan, 1, 1]))
    with pytest.raises(NonFiniteLossError, match=r"learner step 2 is nan, on a batch of 4 items.*checkpoint is .*1\."):
        learner.step(reward_batch([1, 1, 1, 1]))
    learner.close()


def test_non_finite_loss_is_detected_before_priorities_reach_the_buffer():
    buffer = RecordingBuffer()
    learner = make(buffer=buffer, prioritized=True)
    with pytest.raises(NonFiniteLossError, match="learner step 1 is nan"):
        learner.step(reward_batch([1, np.nan, 1, 1]))
    assert buffer.priorities == []


def test_non_finite_parameters_are_never_saved(tmp_path):
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


def test_restored_learner_computes_the_same_as_an_uninterrupted_learner(tmp_path):
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


def test_run_ends_without_an_error_if_the_replay_stops_before_the_learner(tmp_path, monkeypatch):
    class EventWithoutWait(threading.Event):  # the thread that calls `learner.stop` never sees the event
        def wait(self, timeout=None):
            return False

    class Interrupted:
        def __iter__(self):
            yield reward_batch([1, 1, 1, 1])
            end.set()
            raise StoppedError("Stopped while waiting for the replay.")

        def close(self):
            pass

    end = EventWithoutWait()
    monkeypatch.setattr(shutdown, "_program", shutdown._Program(end, lambda: None))
    buffer = RecordingBuffer()
    buffer.make_dataset = Interrupted
    learner = make(tmp_path, buffer)
    learner.run()
    assert learner.learner_steps == 1
    learner.close()
    resumed = make(tmp_path)
    resumed.restore()
    assert resumed.learner_steps == 1  # `run` has saved this step
    resumed.close()


def test_resumed_learner_has_higher_versions_than_the_crashed_learner(tmp_path):
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


def test_final_save_releases_reserved_versions_even_if_the_step_is_already_saved(tmp_path):
    learner = make(tmp_path)
    for _ in range(3):
        learner.step(reward_batch([1, 1, 1, 1]))
    learner._versions._reserve(20)  # reserve many versions, as fast updates do
    learner.saver.save_if_due(now=True)
    learner.saver.save_if_due(final=True)
    learner.close()
    resumed = make(tmp_path)
    resumed.restore()
    assert (resumed.learner_steps, resumed.params_version) == (3, learner.params_version)
    assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == 1
    resumed.close()


def test_restore_without_a_checkpoint_is_rejected(tmp_path):
    learner = make(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        learner.restore()


def test_saving_without_a_directory_is_rejected():
    with pytest.raises(UsageError, match="checkpoint_dir"):
        make().save()


def test_run_learns_from_the_dataset_and_writes_logs_and_checkpoints(tmp_path):
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


def test_data_config_is_passed_to_make_dataset():
    options = {}

    class Replay(ReplayBuffer):
        def make_dataset(self, prefetch=2, timeout=None):
            options.update(prefetch=prefetch, timeout=timeout)
            return super().make_dataset(prefetch, timeout)

    cfg = LearnerConfig(data=DataConfig(prefetch=5, timeout=0.05))
    learner = Learner(cfg, counting_agent(), Replay(counting_agent()))
    with pytest.raises(DatasetTimeoutError, match=r"No batch was available for 0.05 s"):
        learner.run()
    assert options == {"prefetch": 5, "timeout": 0.05}
    learner.close()
    learner = Learner(LearnerConfig(data=DataConfig(threads=3)), counting_agent(), ReplayBuffer(counting_agent()))
    with pytest.raises(UsageError, match=r"data.threads is 3, but make_dataset\(\) .* a ReplayBuffer, takes prefetch"):
        learner.run()
    learner.close()
    with pytest.raises(UsageError, match="DataConfig.prefetch must be at least 1, got 0"):
        DataConfig(prefetch=0)


def test_stop_ends_the_wait_for_a_batch_if_a_subclass_changes_the_dataset():
    given = []

    class Twice(Learner):
        def _make_dataset(self, data_cfg):
            given.append(data_cfg)
            for batch in super()._make_dataset(data_cfg):
                yield batch
                yield batch

    agent = counting_agent()
    buffer = ReplayBuffer(agent)
    learner = Twice(LearnerConfig(data=DataConfig(prefetch=3)), agent, buffer)
    actor = Actor(SyncEnv(CountingEnv, 2, "loop"), Inferencer(InferencerConfig(), agent, learner), buffer)
    thread = threading.Thread(target=learner.run)
    thread.start()
    while buffer.sample() is None:
        actor.step()
    wait_until(lambda: learner.learner_steps >= 2)
    learner.stop()
    thread.join(10.0)
    assert not thread.is_alive() and given == [DataConfig(prefetch=3)]
    for each in (actor, learner):
        each.close()


def test_subclass_can_learn_from_any_iterator_of_batches():
    class Own(Learner):
        def _make_dataset(self, data_cfg):
            return iter([reward_batch([1, 1, 1, 1])] * 3)

    learner = Own(LearnerConfig(), counting_agent(), RecordingBuffer())
    learner.run()
    assert learner.learner_steps == 3
    learner.close()


# --- learners that resume from a directory


def resumed(tmp_path, buffer=None, **config) -> Learner:
    return Learner(LearnerConfig(checkpoint_dir=str(tmp_path), resume=True), counting_agent(**config), buffer)


def test_resumed_learner_publishes_the_parameters_of_its_checkpoint_first(tmp_path):
    learner = make(tmp_path)
    for _ in range(3):
        learner.step(reward_batch([1, 1, 1, 1]))
    learner.save()
    learner.step(reward_batch([9, 9, 9, 9]))  # this update is not saved
    again = resumed(tmp_path)
    version, params = again.get_params(known_version=learner.params_version)
    assert again.learner_steps == 3 and params["w"] == 0.875
    assert version > learner.params_version
    for each in (learner, again):
        each.close()


def test_learner_that_died_before_its_first_checkpoint_restarts_with_higher_versions(tmp_path):
    learner = make(tmp_path)
    for _ in range(1_200):
        learner.step(reward_batch([1, 1, 1, 1]))
    again = resumed(tmp_path)  # replaces the first learner, which saved nothing
    version, params = again.get_params(known_version=learner.params_version)
    assert again.learner_steps == 0 and params["w"] == 0.0
    assert version > learner.params_version
    again.step(reward_batch([1, 1, 1, 1]))
    third = resumed(tmp_path)
    assert third.params_version > again.params_version


def test_resuming_without_a_directory_is_rejected():
    with pytest.raises(UsageError, match="resume needs a checkpoint_dir"):
        LearnerConfig(resume=True)


def filled_buffer(prioritized: bool = False) -> ReplayBuffer:
    agent = counting_agent(prioritized=prioritized)
    buffer = ReplayBuffer(agent)
    inferencer = Inferencer(InferencerConfig(), agent, FixedParams({"w": np.float32(0.0)}))
    actor = Actor(lambda: SyncEnv(CountingEnv, 2, "loop"), inferencer, buffer)
    for _ in range(8):
        actor.step()
    actor.close()
    return buffer


def run_to(steps: int, tmp_path, buffer, **config) -> Learner:
    cfg = LearnerConfig(max_learner_steps=steps, checkpoint_dir=str(tmp_path), resume=True, **config)
    learner = Learner(cfg, counting_agent(prioritized=buffer.spec.kind == "prioritized"), buffer)
    learner.run()
    learner.close()
    return learner


def checkpoints(tmp_path) -> list[int]:
    return sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit())


def replays(tmp_path) -> list[int]:
    return sorted(int(path.name) for path in (tmp_path / "replay").iterdir())


def test_learner_survives_a_full_disk_but_fails_if_the_final_checkpoint_cannot_be_written(small_disk, caplog):
    config = LearnerConfig(checkpoint_dir=str(small_disk.path / "checkpoints"))
    learner = Learner(config, counting_agent(prioritized=True), filled_buffer(prioritized=True))
    learner.step(reward_batch([1.0]))
    learner.saver.save_if_due(now=True)
    small_disk.fill()
    learner.step(reward_batch([1.0]))
    learner.saver.save_if_due(now=True)
    assert "Learning continues. The next checkpoint will be tried when it is due." in caplog.text
    assert checkpoints(small_disk.path / "checkpoints") == replays(small_disk.path / "checkpoints") == [1]
    with pytest.raises(CheckpointError, match="could not be saved|Cannot write checkpoint"):
        learner.saver.save_if_due(final=True)
    small_disk.free()
    learner.saver.save_if_due(final=True)
    assert checkpoints(small_disk.path / "checkpoints") == replays(small_disk.path / "checkpoints") == [1, 2]
    learner.close()


def test_versions_can_be_reserved_on_a_full_disk(small_disk):
    counter = VersionCounter(small_disk.path)
    counter.next()
    small_disk.fill()
    given = [counter.next() for _ in range(3_000)][-1]
    after = VersionCounter(small_disk.path)
    after.resume(1)
    assert after.value > given


def test_run_saves_the_replay_with_each_checkpoint_and_resume_restores_the_replay(tmp_path):
    buffer = filled_buffer(prioritized=True)
    run_to(20, tmp_path, buffer, checkpoint_every=4)
    assert checkpoints(tmp_path) == replays(tmp_path) == [12, 16, 20]
    empty = ReplayBuffer(counting_agent(prioritized=True))
    learner = resumed(tmp_path, empty, prioritized=True)
    assert learner.learner_steps == 20
    ahead = buffer.stats()["sampled"] - empty.stats()["sampled"]  # batches that `run` fetched ahead after its last save
    assert empty.stats() == {**buffer.stats(), "sampled": buffer.stats()["sampled"] - ahead}
    assert 0 <= ahead <= 5 * 4
    assert empty.sample() is not None
    learner.close()


def test_large_replay_is_saved_rarely_and_only_the_newest_copy_is_kept(tmp_path, monkeypatch):
    buffer, written = filled_buffer(), []
    monkeypatch.setattr(replay_files, "_SMALL_BYTES", 100)
    monkeypatch.setattr(replay_files, "_MAX_SAVE_FRACTION", 1e-9)
    monkeypatch.setattr(buffer, "save", lambda path: (written.append(path.name), ReplayBuffer.save(buffer, path)))
    run_to(18, tmp_path, buffer, checkpoint_every=4)
    # The replay is saved with checkpoint 4 and with the final checkpoint 19. Checkpoint 18 is final, but has no replay.
    assert written == ["4", "19"]
    assert checkpoints(tmp_path) == [16, 18, 19]
    assert replays(tmp_path) == [19]


def test_save_removes_a_replay_whose_checkpoint_was_never_written(tmp_path, monkeypatch):
    buffer = filled_buffer()
    run_to(4, tmp_path, buffer)

    def fail(*args, **kwargs):
        raise OSError("killed")

    learner = Learner(LearnerConfig(checkpoint_dir=str(tmp_path), resume=True), counting_agent(), buffer)
    learner.step(buffer.sample())
    with monkeypatch.context() as patch:
        patch.setattr(learner._checkpointer, "_manager", fail)
        with pytest.raises(CheckpointError, match="killed"):
            learner.save(with_replay=True)
    assert (checkpoints(tmp_path), replays(tmp_path)) == ([4], [4, 5])
    learner.save()  # a new checkpoint 5, which must not use the old replay 5
    assert (checkpoints(tmp_path), replays(tmp_path)) == ([4, 5], [4])
    learner.close()
    (tmp_path / "replay" / "7").write_bytes(b"of a checkpoint that was cut off")
    (tmp_path / "replay" / ".8.123.new").write_bytes(b"cut off")
    assert run_to(6, tmp_path, ReplayBuffer(counting_agent())).learner_steps == 6
    assert (checkpoints(tmp_path), replays(tmp_path)) == ([4, 5, 6], [4, 6])


def test_learner_resumed_at_its_last_step_does_no_update(tmp_path):
    buffer = filled_buffer()
    run_to(5, tmp_path, buffer)
    assert run_to(5, tmp_path, buffer).learner_steps == 5
    assert checkpoints(tmp_path) == [5]


def test_save_soon_writes_a_checkpoint_while_run_waits_for_a_batch(tmp_path):
    buffer = filled_buffer()
    cfg = LearnerConfig(checkpoint_dir=str(tmp_path), checkpoint_seconds=1e9)
    learner = Learner(cfg, counting_agent(), buffer)
    dataset, unblock = buffer.make_dataset(), threading.Event()

    class Dataset:
        def __iter__(self):
            for _ in range(3):
                yield next(dataset)
            unblock.wait(60.0)

        def close(self):
            unblock.set()

    buffer.make_dataset = Dataset
    running = threading.Thread(target=learner.run)
    running.start()
    wait_until(lambda: learner.learner_steps == 3)
    for _ in range(5):
        learner.save_soon()
    wait_until(lambda: checkpoints(tmp_path) == [3])
    learner.save_soon()  # nothing has changed since the last save, so this call saves nothing
    learner.stop()
    running.join(60.0)
    assert not running.is_alive()
    assert checkpoints(tmp_path) == replays(tmp_path) == [3]
    dataset.close()
    learner.close()


def test_error_in_the_thread_of_save_soon_is_raised_by_run(tmp_path, monkeypatch):
    buffer = filled_buffer()
    learner = Learner(LearnerConfig(checkpoint_dir=str(tmp_path)), counting_agent(), buffer)

    def fail(*args, **kwargs):
        raise FencedError("another learner is at this task")

    monkeypatch.setattr(Checkpointer, "save", fail)
    learner.step(buffer.sample())
    learner.save_soon()
    with pytest.raises(FencedError, match="another learner"):
        learner.run()
    learner.close()


def test_stats_are_numbers_and_do_not_wait_for_an_update(tmp_path):
    buffer, updating, unblock = filled_buffer(), threading.Event(), threading.Event()
    learner = Learner(LearnerConfig(), counting_agent(), buffer)
    for _ in range(3):
        learner.step(buffer.sample())
    wait_until(lambda: "replay_added" in learner.stats())  # fetched by another thread
    stats = learner.stats()
    assert (stats["learner_steps"], stats["params_version"], stats["finished"]) == (3, 4, False)
    assert stats["loss"] == 0.25 and stats["replay_added"] == buffer.stats()["added"] == 12
    assert all(isinstance(value, (int, float)) for value in stats.values())

    def slow_update(*args):
        updating.set()
        assert unblock.wait(60.0)
        raise StoppedError("the test ends the update")

    def slow_stats():
        assert unblock.wait(60.0)
        return {}

    slow_update.put = lambda batch: batch
    learner._update = slow_update  # simulates a compilation
    buffer.stats = slow_stats
    thread = threading.Thread(target=lambda: update(learner, buffer.sample()))
    thread.start()
    assert updating.wait(60.0)
    began = time.monotonic()
    assert learner.stats()["learner_steps"] == 3
    assert time.monotonic() - began < 30.0  # less than the 60 s of the slow calls
    unblock.set()
    thread.join(60.0)


@pytest.mark.parametrize(
    ("value", "found"), [(np.zeros(3, np.float32), r"float32 of shape \(3,\)"), ("high", r"<U4 of shape \(\)")]
)
def test_update_raises_an_error_for_a_log_that_is_not_a_number(value, found):
    class Logs(CountingAgent):
        jit_learner_step = False

        def learner_step(self, *args):
            params, learner_state, logs = super().learner_step(*args)
            return params, learner_state, {**logs, "errors": value}

    learner = Learner(LearnerConfig(), Logs(CountingConfig(), OBSERVATION_SPEC, ACTION_SPEC), RecordingBuffer())
    with pytest.raises(UsageError, match=f"logs 'errors' as {found}; a log is one number"):
        learner.step(reward_batch([1, 1, 1, 1]))
    assert learner.stats()["learner_steps"] == 0


def test_error_names_the_method_that_the_replay_buffer_lacks():
    class Nothing:
        pass

    with pytest.raises(UsageError, match=r"a Nothing, needs make_dataset\(\)\. run\(\) takes batches from it"):
        Learner(LearnerConfig(), counting_agent(), Nothing()).run()
    with pytest.raises(UsageError, match=r"needs update_priorities\(\)\. The agent logs priorities"):
        Learner(LearnerConfig(), counting_agent(prioritized=True), Nothing()).step(reward_batch([1.0]))


def test_stats_contain_the_newest_replay_counters_that_have_arrived(monkeypatch):
    answers, unblock = iter([1, 2]), threading.Event()

    def stats():
        answer = next(answers, None)
        if answer is None:
            raise PeerError("gone")
        if answer == 2:
            unblock.wait(60.0)
        return {"answer": answer}

    monkeypatch.setattr(learner_replay, "_PATIENCE", 0.01)
    agent = counting_agent()
    buffer = ReplayBuffer(agent)
    learner = Learner(LearnerConfig(), agent, buffer)
    buffer.stats = stats
    wait_until(lambda: learner.stats().get("replay_answer") == 1)
    assert learner.stats()["replay_answer"] == 1  # the second response has not arrived
    unblock.set()
    wait_until(lambda: learner.stats()["replay_answer"] == 2)
    assert learner.stats()["replay_answer"] == 2  # after the second response, the buffer raises errors


def update(learner, batch):
    with pytest.raises(StoppedError):
        learner.step(batch)
