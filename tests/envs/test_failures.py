"""If an environment raises, hangs, dies or returns wrong values, the error contains its id, and all workers end."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from rlframe.envs import AsyncEnv, SyncEnv
from rlframe.errors import EnvError, UsageError
from tests.envs.scripted import FaultyEnv, ScriptedDictEnv, ScriptedEnv
from tests.waiting import wait_until

SYNC_TYPES = ("loop", "thread", "process")


def run_sync(fault, type, victim=2, **options):
    with SyncEnv(functools.partial(FaultyEnv, fault, victim), 4, type, num_workers=2, **options) as pool:
        pool.reset()
        for _ in range(4):
            pool.step(np.zeros(4, np.int32))


def run_async(fault, type, victim=2, **options):
    with AsyncEnv(functools.partial(FaultyEnv, fault, victim), 4, 2, type, num_workers=2, **options) as pool:
        while True:  # healthy environments continue until `recv` raises the error
            env_ids, _ = pool.recv()
            pool.send(env_ids, np.zeros(2, np.int32))


RUNS = [(run_sync, type) for type in SYNC_TYPES]
RUNS += [(run_async, "thread"), pytest.param(run_async, "process", marks=pytest.mark.system)]


@pytest.mark.parametrize(("run", "type"), RUNS)
def test_error_of_an_environment_contains_its_traceback_and_id(run, type):
    with pytest.raises(EnvError, match=r"Environment 2 raised KeyError in step\(\): 'the wheel came off'") as caught:
        run("raise", type)
    assert "scripted.py" in caught.value.traceback_text
    assert 'raise KeyError("the wheel came off")' in caught.value.traceback_text
    # The traceback is also the cause, so that an uncaught error prints it.
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError) or str(cause).strip() == caught.value.traceback_text.strip()


@pytest.mark.parametrize(("run", "type"), RUNS)
def test_system_exit_in_an_environment_becomes_an_env_error(run, type):
    with pytest.raises(EnvError, match=r"Environment 2 raised SystemExit in step\(\): out of fuel"):
        run("exit", type)
    with pytest.raises(EnvError, match="Building environment 2 failed: SystemExit: no fuel"):
        run("exit in build", type)


@pytest.mark.parametrize(("run", "type"), RUNS)
def test_error_for_a_wrong_observation_contains_the_environment_id_the_leaf_and_both_shapes(run, type):
    with pytest.raises(
        UsageError, match=r"Environment 2 gave 'observation' as float64 of shape \(2,\).*float32.*\(3,\)"
    ):
        run("shape", type)
    with pytest.raises(UsageError, match=r"Environment 2 gave 'observation' as <U"):
        run("dtype", type)


@pytest.mark.parametrize(("run", "type"), RUNS)
def test_error_for_a_wrong_reward_contains_the_environment_id(run, type):
    with pytest.raises(UsageError, match=r"Environment 2 gave array\(\[1\.\]\) as its reward: expected one number"):
        run("reward shape", type)
    with pytest.raises(EnvError, match="Environment 2 gave 'reward' with nan: expected finite numbers"):
        run("reward nan", type)


@pytest.mark.parametrize("run", [run_sync, run_async])
@pytest.mark.parametrize(("fault", "received"), [("reward text", "'much'"), ("reward dict", "{'speed': 1.0}")])
def test_error_for_a_non_numeric_reward_contains_its_value(run, fault, received):
    with pytest.raises(UsageError, match=f"Environment 2 gave {received} as its reward: expected one number"):
        run(fault, "thread")


@pytest.mark.parametrize(("run", "type"), RUNS)
def test_error_for_a_nan_observation_contains_the_environment_id_and_the_index(run, type):
    with pytest.raises(EnvError, match=r"Environment 2 gave 'observation' with nan at \(1,\): expected finite"):
        run("nan", type)


def test_check_finite_false_allows_nan_observations():
    with SyncEnv(functools.partial(FaultyEnv, "nan", 0), 1, "loop", check_finite=False) as pool:
        pool.reset()
        observations = [pool.step([0]).observation for _ in range(2)]
    assert np.isnan(observations[1]).tolist() == [[False, True, False]]


@pytest.mark.parametrize("check_finite", [None, False, True])
def test_envpool_rewards_are_checked_for_nan_only_if_check_finite_is_true(check_finite):
    with SyncEnv("CartPole-v1", 2, "envpool", check_finite=check_finite) as pool:
        timestep = pool.reset()
        pool._pool.step = lambda actions: timestep._replace(reward=np.array([0.0, np.nan], np.float32))
        if check_finite:
            with pytest.raises(EnvError, match="Environment 1 gave 'reward' with nan"):
                pool.step([0, 0])
        else:
            assert np.isnan(pool.step([0, 0]).reward).tolist() == [False, True]


class Diverging(ScriptedDictEnv):
    """An environment whose observation contains infinity, in a nested leaf, after the first episode."""

    def _observation(self):
        observation = super()._observation()
        observation["numbers"][2] = np.inf if self.episode else 0.0
        return observation


def test_nested_observations_are_checked_for_infinity_at_reset():
    with SyncEnv(Diverging, 2, "loop") as pool:
        pool.reset()
        with pytest.raises(EnvError, match=r"Environment 0 gave 'observation.numbers' with inf at \(2,\)"):
            pool.reset()


@pytest.mark.parametrize(("run", "type"), RUNS)
def test_error_for_a_failed_builder_contains_the_environment_id(run, type):
    with pytest.raises(EnvError, match="Building environment 2 failed: RuntimeError: no such level"):
        run("build", type)


@pytest.mark.parametrize(("run", "type"), RUNS)
def test_environments_with_different_specs_are_refused(run, type):
    for victim in (2, 3):  # first and second environment of the second worker
        with pytest.raises(UsageError, match="different specs"):
            run("spec", type, victim)


@pytest.mark.parametrize("is_sync", [True, False])
def test_killed_worker_raises_immediately(is_sync):
    if is_sync:
        pool = SyncEnv(ScriptedEnv, 4, "process", num_workers=2)
        pool.reset()
    else:
        pool = AsyncEnv(ScriptedEnv, 4, 4, "process", num_workers=2)
        env_ids, _ = pool.recv()
    with pool:
        pid = worker_pids(pool)[1]
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        with pytest.raises(
            EnvError, match=rf"worker process 1 \(pid {pid}\) of environments 2 to 3 was killed by SIGKILL"
        ):
            for _ in range(3):
                if is_sync:
                    pool.step(np.zeros(4, np.int32))
                else:
                    pool.send(env_ids, np.zeros(4, np.int32))
                    env_ids, _ = pool.recv()
        assert time.monotonic() - started < 60.0  # much less than the answer timeout


def test_worker_killed_during_a_step_raises():
    with SyncEnv(functools.partial(FaultyEnv, "hang", 2), 4, "process", num_workers=2) as pool:
        pool.reset()
        pool.step(np.zeros(4, np.int32))
        pid = worker_pids(pool)[1]
        killer = call_during_a_step(pool, functools.partial(os.kill, pid, signal.SIGKILL))
        started = time.monotonic()
        with pytest.raises(EnvError, match="killed by SIGKILL"):
            pool.step(np.zeros(4, np.int32))
        assert time.monotonic() - started < 60.0
        killer.join()


@pytest.mark.system
@pytest.mark.parametrize("is_sync", [True, pytest.param(False, marks=pytest.mark.system)])
def test_hung_worker_raises_after_the_answer_timeout(is_sync):
    message = "No answer from environment 2 within 3 s: it hangs"  # 3 s, because a healthy environment can need 1 s
    with pytest.raises(EnvError, match=message):
        (run_sync if is_sync else run_async)("hang", "process", answer_timeout=3.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_answer_timeout_must_be_positive_and_finite(seconds):
    with pytest.raises(UsageError, match="answer_timeout must be a number of seconds above 0"):
        SyncEnv(ScriptedEnv, 1, "thread", answer_timeout=seconds)


@pytest.mark.parametrize("type", ["thread", "process"])
def test_close_ends_all_threads_processes_and_descriptors(type):
    with SyncEnv(ScriptedEnv, 4, type, num_workers=2) as pool:  # the first pool fills caches and imports modules
        pool.reset()
    del pool
    gc.collect()
    threads, descriptors = threading.active_count(), open_descriptors()
    pids = []
    for make in (SyncEnv, functools.partial(AsyncEnv, wait_num=2)):
        pool = make(ScriptedEnv, 4, type=type, num_workers=2)
        pool.reset() if pool.is_sync else pool.recv()
        pids += worker_pids(pool) if type == "process" else []
        pool.close()
    del pool
    gc.collect()
    # The counts can decrease, because threads and descriptors of earlier tests can end at the same time.
    assert threading.active_count() <= threads
    assert open_descriptors() <= descriptors
    assert not any(map(alive, pids))


def test_garbage_collected_pool_ends_its_workers():
    pool = SyncEnv(ScriptedEnv, 2, "process", num_workers=2)
    pids = worker_pids(pool)
    assert all(map(alive, pids))
    del pool
    gc.collect()
    assert not any(map(alive, pids))


@pytest.mark.system
def test_workers_survive_the_thread_that_created_their_pool():
    made = []
    thread = threading.Thread(target=lambda: made.append(SyncEnv(ScriptedEnv, 2, "process", num_workers=2)))
    thread.start()
    thread.join()
    with made[0] as pool:
        pool.reset()
        until = time.monotonic() + 4.0  # the kernel kills workers 3 s after their parent dies
        while time.monotonic() < until:
            pool.step(np.zeros(2, np.int32))
            time.sleep(0.1)


def test_failed_start_ends_all_workers():
    before = set(children())
    with pytest.raises(EnvError):
        run_sync("build", "process")
    assert set(children()) <= before


ORPHAN = """
import functools, sys
import numpy as np
from rlframe.envs import SyncEnv
from tests.envs.scripted import FaultyEnv
pool = SyncEnv(functools.partial(FaultyEnv, sys.argv[1], 1), 2, "process", num_workers=2)
pool.reset()
print(*[process.pid for process in pool._pool.processes], flush=True)
while True:
    pool.step(np.zeros(2, np.int32))
"""


@pytest.mark.parametrize("fault", ["none", pytest.param("hang", marks=pytest.mark.system), "hang in C"])
def test_workers_end_after_their_parent_is_killed(fault):
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN, fault], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(map(alive, pids))
    if fault != "none":
        assert parent.stdout.readline() == "hangs\n"  # now a worker is in a step
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        wait_until(lambda: not any(map(alive, pids)))
    finally:
        for pid in filter(alive, pids):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("as_name", ["lambda", "closure", "file"])
def test_worker_processes_run_builders_that_they_cannot_import(as_name, tmp_path):
    if as_name == "lambda":
        builder = lambda seed: FaultyEnv("none", 0, seed)  # noqa: E731
    elif as_name == "closure":
        victim = 0
        builder = functools.partial(lambda fault, seed: FaultyEnv(fault, victim, seed), "none")
    else:
        path = tmp_path / "my_envs.py"
        path.write_text(
            "from tests.envs.scripted import ScriptedEnv\n"
            "class Mine(ScriptedEnv):\n    pass\n"
            "def make_env(seed):\n    return Mine()\n"
        )
        spec = importlib.util.spec_from_file_location("my_envs_from_a_path", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        builder = module.make_env
    with SyncEnv(builder, 2, "process", num_workers=1) as pool:
        assert pool.reset().observation.shape == (2, 3)


def test_builder_that_cannot_be_pickled_is_refused():
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"cannot be sent to a worker process.*use type 'thread'"):
        SyncEnv(lambda: (lock, ScriptedEnv())[1], 2, "process")


@pytest.mark.system
def test_interrupted_pool_raises_at_the_next_step():
    with SyncEnv(functools.partial(FaultyEnv, "hang", 2), 4, "process", num_workers=2) as pool:
        pool.reset()
        pool.step(np.zeros(4, np.int32))
        with pytest.raises(KeyboardInterrupt):
            interrupter = call_during_a_step(pool, functools.partial(os.kill, os.getpid(), signal.SIGINT))
            pool.step(np.zeros(4, np.int32))
        interrupter.join()
        with pytest.raises(EnvError, match="interrupted or failed in a step"):
            pool.step(np.zeros(4, np.int32))


@pytest.mark.parametrize("type", ["thread", "process"])
def test_failed_async_pool_raises_at_the_next_recv(type):
    builder = functools.partial(FaultyEnv, "raise", 2)
    with AsyncEnv(builder, 4, 4, type, num_workers=2) as pool:
        env_ids, _ = pool.recv()
        pool.send(env_ids, np.zeros(4, np.int32))
        env_ids, _ = pool.recv()
        pool.send(env_ids, np.zeros(4, np.int32))
        with pytest.raises(EnvError, match="Environment 2 raised KeyError"):
            pool.recv()
        for _ in range(2):
            with pytest.raises(EnvError, match="interrupted or failed in a step"):
                pool.recv()  # raises, because the failed environment will never be ready


@pytest.mark.parametrize("type", ["thread", "process"])
def test_failed_async_pool_raises_at_the_next_send(type):
    with AsyncEnv(functools.partial(FaultyEnv, "raise", 2), 4, 1, type, num_workers=4) as pool:
        for _ in range(4):
            pool.recv()
        pool.send([1, 2, 3], np.zeros(3, np.int32))
        with pytest.raises(EnvError, match="Environment 2 raised KeyError"):
            while True:
                env_ids, _ = pool.recv()
                pool.send(env_ids, np.zeros(1, np.int32))
        with pytest.raises(EnvError, match="interrupted or failed in a step"):
            pool.send([0], np.zeros(1, np.int32))


class Imports(ScriptedEnv):
    """An environment whose observation shows whether its process has imported JAX, EnvPool and TensorFlow."""

    def _observation(self):
        return np.array(["jax" in sys.modules, "envpool" in sys.modules, "tensorflow" in sys.modules], np.float64)


def test_workers_do_not_import_jax_or_envpool():
    with SyncEnv(Imports, 1, "process") as pool:
        assert pool.reset().observation.tolist() == [[0.0, 0.0, 0.0]]


def call_during_a_step(pool, action):
    """Start a thread that calls `action` during the next step of the pool."""
    thread = threading.Thread(target=lambda: (wait_until(lambda: pool._pool._is_waiting), action()))
    thread.start()
    return thread


def worker_pids(pool):
    return [process.pid for process in pool._pool.processes]


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


def open_descriptors():
    return len(os.listdir("/proc/self/fd"))


class WaitingEnv(ScriptedEnv):
    """An environment whose steps wait until `may_step` is set."""

    may_step = threading.Event()
    is_stepping = threading.Event()

    def step(self, action):
        self.is_stepping.set()
        assert self.may_step.wait(60.0)
        return super().step(action)


def test_recv_of_an_async_pool_ends_if_another_thread_closes_the_pool():
    WaitingEnv.may_step.clear()
    pool, errors = AsyncEnv(WaitingEnv, 2, 2, "thread", num_workers=1), []

    def receive():
        with pytest.raises(EnvError) as caught:
            pool.recv()
        errors.append(str(caught.value))

    env_ids, _ = pool.recv()
    pool.send(env_ids, np.zeros(2, np.int32))
    receiver = threading.Thread(target=receive)
    receiver.start()
    assert WaitingEnv.is_stepping.wait(60.0)
    pool.close()
    WaitingEnv.may_step.set()
    receiver.join(60.0)
    assert not receiver.is_alive() and "interrupted or failed in a step" in errors[0]
