"""All types of pools sum the numbers that their environments log."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from gymnasium.wrappers import RecordEpisodeStatistics

from rlframe.envs import AsyncEnv, SyncEnv
from rlframe.envs.logs import MAX_NAMES, EnvLog
from tests.envs.scripted import ScriptedDmEnv, ScriptedEnv

TYPES = [("sync", "loop"), ("sync", "thread"), ("sync", "process"), ("async", "thread"), ("async", "process")]


class Logging(ScriptedEnv):
    """An environment that logs `t` at each step, and `height` at the end of each episode."""

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        info = {"log": {"t": np.int64(self.t)}}
        if terminated or truncated:
            info["log"]["height"] = 0.5
        return observation, reward, terminated, truncated, info


def recorded():
    return RecordEpisodeStatistics(ScriptedEnv())


class LoggingDm(ScriptedDmEnv):
    def log_values(self):
        return {"t": self.env.t}


def play(kind, type, builder, num_steps=9):
    """Step 4 environments and return their sums.

    Each environment's 9 steps are 3 steps, a reset, 2 steps, a reset, and the first 2 steps of a third episode.
    """
    if kind == "sync":
        with SyncEnv(builder, 4, type, num_workers=2) as pool:
            pool.reset()
            assert pool.sums() == {}
            for _ in range(num_steps):
                pool.step(np.zeros(4, np.int32))
            return pool.sums()
    with AsyncEnv(builder, 4, 4, type, num_workers=2) as pool:
        for _ in range(num_steps):
            pool.send(pool.recv()[0], np.zeros(4, np.int32))
        pool.recv()
        return pool.sums()


@pytest.mark.parametrize(("kind", "type"), TYPES)
def test_pool_sums_the_values_that_its_environments_log(kind, type):
    assert play(kind, type, Logging) == {"t": [4 * (6.0 + 3.0 + 3.0), 4 * 7.0], "height": [4.0, 8.0]}


@pytest.mark.parametrize("type", ["loop", "process"])
def test_pool_logs_the_values_of_the_wrapper_record_episode_statistics(type):
    sums = play("sync", type, recorded)
    assert sums.keys() == {"episode_return", "episode_length", "episode_seconds"}
    assert sums["episode_return"] == [4 * (6.0 + 3.0), 8.0] and sums["episode_length"] == [4 * (3.0 + 2.0), 8.0]


def test_dm_env_environment_logs_the_result_of_log_values():
    assert play("sync", "loop", LoggingDm) == {"t": [48.0, 28.0]}
    assert play("sync", "loop", ScriptedDmEnv) == {}


def test_restored_environments_continue_to_log():
    with SyncEnv(Plain, 1, "loop") as pool:
        pool.reset()
        pool.step([0])
        pool.set_state(pool.get_state())
        pool.step([0])
        assert pool.sums() == {"t": [3.0, 2.0]}


class Plain(Logging):
    """A `Logging` environment that can be pickled, so that a pool can save its state."""

    def __init__(self):
        self.mark, self.episode, self.t = 0, -1, 0


class Misusing(Logging):
    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        info["log"].update({"text": "much", "nan": np.nan, "array": np.ones(2), 3: 1.0, "n" * 57: 1.0, "huge": 10**400})
        return observation, reward, terminated, truncated, info if self.t < 2 else {"log": [1.0], "episode": 7}


def test_invalid_logged_values_are_skipped_with_one_warning_each(caplog):
    sums = play("sync", "loop", functools.partial(Misusing))
    assert sums == {"t": [12.0, 12.0]}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 7
    assert messages[0].startswith("Environment 0 logged 'text' as 'much': expected a finite number. The metrics do not")
    assert "'nan' as nan" in messages[1] and "'array' as array([1., 1.])" in messages[2]
    assert "logged 3: expected a name of 1 to 56 bytes" in messages[3] and "nnn': expected a name" in messages[4]
    assert "logged 'huge' as 1000" in messages[5]
    assert "logged [1.0]: expected a dict of names and numbers" in messages[6]


def test_log_skips_new_names_after_the_maximum_number_of_names(caplog):
    log = EnvLog()
    log.add(0, {f"ä{i}": i for i in range(MAX_NAMES + 1)})
    assert log.sums() == {f"ä{i}": [i, 1.0] for i in range(MAX_NAMES)}
    assert "expected 64 names at most" in caplog.text


def test_envpool_logs_nothing():
    with SyncEnv("CartPole-v1", 2, "envpool") as pool:
        pool.reset()
        assert pool.sums() == {}


def test_partly_written_name_is_not_in_the_sums():
    names, values = np.zeros(MAX_NAMES, "S56"), np.zeros((MAX_NAMES, 2))
    log = EnvLog(names, values)
    log.add(0, {"speed": 2.0})
    names[1] = "höhe".encode()[:2]  # the first two bytes end in the middle of the letter ö
    assert log.sums() == {"speed": [2.0, 1.0]}
