"""Several seeds of the topology fused in one process: each run gives the results of a single run with its seed."""

from __future__ import annotations

import re
import threading

import psutil
import pytest

from rlframe.device import seeds
from rlframe.device.seeds import JointCall
from rlframe.errors import UsageError
from rlframe.metrics.files import read_jsonl
from rlframe.programs import run_experiment, run_seeds
from tests.programs.test_fused import DQN, PPO, SMALL, experiment, largest_difference

IMAGES = {"env": "jax:Breakout-MinAtar", "network": "nature_cnn", "network.channels": (4,), "network.kernels": (3,)}
IMAGES |= {"network.strides": (1,), "network.hidden": (16,)}


class FailsOnce:
    """A callback that raises when it is called for the first time."""

    def __init__(self) -> None:
        self.has_failed, self._lock = False, threading.Lock()

    def __call__(self, info) -> None:
        with self._lock:
            fails, self.has_failed = not self.has_failed, True
        if fails:
            raise ValueError("the callback of one run failed")


@pytest.mark.parametrize(
    ("agent", "options"),
    [
        pytest.param(
            "ppo", {**PPO, "normalize_observations": True, "normalize_rewards": True}, marks=pytest.mark.system
        ),
        pytest.param("dqn", DQN, marks=pytest.mark.system),
        pytest.param("dqn", {**DQN, "prioritized": True, "update_period": 2}, marks=pytest.mark.system),
        pytest.param(
            "impala", {"unroll_length": 8, "batch_size": 6, "eval_episodes": 2, **SMALL}, marks=pytest.mark.system
        ),
        pytest.param(
            "ppo",
            {"unroll_length": 8, "num_minibatches": 2, **IMAGES},
            marks=pytest.mark.system,
        ),
    ],
    ids=["ppo", "dqn", "prioritized dqn", "impala", "ppo with images"],
)
def test_seeds_give_the_results_of_single_runs_after_a_failure_and_a_resume(agent, options, tmp_path, monkeypatch):
    monkeypatch.setattr(seeds, "_is_vmapped", lambda: True)  # also on a CPU; agents with images ignore it
    is_dqn = agent == "dqn"
    values = experiment(agent, **{"until_learner_steps": 20, "log_every": 20 if is_dqn else 150, **options})
    runs = {seed: tmp_path / f"seed-{seed}" for seed in (3, 4)}
    outcomes, signal = run_seeds(values, runs, stop_at=60 if is_dqn else 300, callbacks=[FailsOnce()])
    (failed,) = (seed for seed, outcome in outcomes.items() if isinstance(outcome, ValueError))
    steps = outcomes[7 - failed].env_steps
    assert signal is None and (60 <= steps < 70 if is_dqn else 300 <= steps < 340)
    outcomes, _ = run_seeds(values, runs, resume=True)
    alone = run_experiment(values, run_dir=tmp_path / "alone")  # its seed is 3
    assert (outcomes[3].env_steps, outcomes[3].learner_steps) == (alone.env_steps, 20)
    assert outcomes[3].return_mean == alone.return_mean
    assert largest_difference(runs[3], tmp_path / "alone") < 1e-5 < 1e-3 < largest_difference(runs[3], runs[4])
    last, expected = (read_jsonl(path / "metrics.jsonl")[-1] for path in (runs[3], tmp_path / "alone"))
    assert {name: last.get(name) for name in ("step", "episode_return")} == {
        name: expected.get(name) for name in ("step", "episode_return")
    }


def test_joint_call_waits_for_all_members_that_have_not_left():
    calls, results = [], {}
    joint = JointCall("abc")

    def double(arguments):
        calls.append(dict(arguments))
        return {member: 2 * argument for member, argument in arguments.items()}

    def run(member: str, arguments: list[int]) -> None:
        results[member] = [joint(member, argument, double) for argument in arguments]
        joint.leave(member)

    threads = [
        threading.Thread(target=run, args=(name, list(range(count))), daemon=True)
        for name, count in zip("abc", (1, 2, 4))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert results == {"a": [0], "b": [0, 2], "c": [0, 2, 4, 6]}
    assert calls == [{"a": 0, "b": 0, "c": 0}, {"b": 1, "c": 1}, {"c": 2}, {"c": 3}]


def test_error_of_a_joint_call_reaches_all_members():
    joint, errors = JointCall("ab"), {}

    def run(member: str) -> None:
        try:
            joint(member, None, lambda arguments: {}[0])
        except KeyError as error:
            errors[member] = error

    threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert errors.keys() == {"a", "b"} and errors["a"] is errors["b"]


def test_replays_that_do_not_fit_into_memory_together_are_refused(tmp_path):
    bytes_per_step = 4 * 4 + 1 + 3 * 4  # observation, step type, and action, reward and discount
    # Two replays and a checkpoint of one do not fit. A single run fits.
    capacity = int(0.4 * psutil.virtual_memory().available / bytes_per_step)
    values = experiment("dqn", **{**DQN, "replay_capacity": capacity})
    outcomes, _ = run_seeds(values, {seed: tmp_path / str(seed) for seed in (1, 2)})
    for outcome in outcomes.values():
        needed = float(re.match(r"The replay needs (\d+.\d) GiB of device memory", str(outcome))[1])
        assert needed * 2**30 == pytest.approx(3 * capacity * bytes_per_step, rel=0.01)
    assert not any((tmp_path / str(seed)).exists() for seed in (1, 2))


def test_other_topologies_are_refused(tmp_path):
    with pytest.raises(UsageError, match="run_seeds needs the topology fused, but the topology is single_process"):
        run_seeds(experiment("ppo", "single_process", **PPO), {1: tmp_path / "1"})
