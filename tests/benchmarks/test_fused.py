"""Tests of the benchmark of the topology fused: its tables, and its scripts."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks import fused
from benchmarks.context import Context
from benchmarks.ours.train import covered_seconds, experiment
from benchmarks.report import NotMeasured


@dataclasses.dataclass(frozen=True)
class KnownSpeeds(Context):
    """A context in which fused makes 9 steps/s, 16 seeds 14.4, single_process 3, and PureJaxRL 8."""

    def ours(self, name: str, *arguments: Any, env: dict[str, str] | None = None) -> dict[str, Any]:
        is_fused = name == "seeds" or "fused" in arguments
        rate = 14.4 if name == "seeds" else 9.0 if is_fused else 3.0
        return {"steps_per_second": rate, "compile_seconds": 7.0}

    def purejaxrl_ppo(self, *arguments: Any, env: dict[str, str] | None = None) -> dict[str, Any]:
        return {"steps_per_second": 8.0, "compile_seconds": 4.0}


def test_tables_compare_fused_with_all_targets_of_the_issue():
    four, compiled, many, _, dqn, seeds = fused.run(KnownSpeeds(repeats=1, quick=True), lambda _: None)
    assert [row.target for row in four.others] == [4.0, 4.0, 1.0, None]
    assert [row.target for row in many.others] == [2.4, 2.4, 1.15, None]
    assert [four.ratio(row) for row in four.others] == [3.0, 3.0, 1.125, 1.125]
    assert len(four.missed_targets()) == 2 and len(many.missed_targets()) == 1
    assert [row.name for row in compiled.others] == ["PureJaxRL", "PureJaxRL, XLA's older runtime"]
    assert compiled.ours.value == 7.0 and compiled.missed_targets() == []  # less than twice the time
    assert [row.target for row in dqn.others] == [3.0, 3.0] and dqn.missed_targets() == []
    assert seeds.ratio(seeds.others[0]) == pytest.approx(1.6) and seeds.others[0].target == 1.6


@pytest.mark.parametrize(
    ("given", "missing"),
    [({}, "--purejaxrl was not given"), ({"purejaxrl": Path(".")}, "--purejaxrl-python was not given")],
)
def test_missing_purejaxrl_is_not_measured(given, missing):
    with pytest.raises(NotMeasured, match=missing):
        Context(**given).purejaxrl_ppo()


def test_nested_compilations_count_once():
    assert covered_seconds([(2.0, 3.0), (1.0, 4.0), (3.5, 4.5), (6.0, 7.0)]) == 4.5


def test_experiment_has_the_networks_and_the_batches_of_purejaxrl():
    found = experiment("ppo_purejaxrl_64", 1, 100, 10, 0, 500_000, "jax:CartPole-v1", "fused")
    cfg, topology = found.agent_config, found.topology_config
    assert (found.num_envs, cfg.unroll_length, cfg.num_minibatches, cfg.num_epochs) == (64, 128, 4, 4)
    assert topology.name == "fused" and topology.network_config.hidden == (64, 64)


@pytest.mark.system
def test_fused_training_is_measured_after_its_compilation():
    arguments = ("--steps", 8_000, "--warm-up", 2_000, "--log-every", 1_000)
    found = Context().ours("train", "ppo_purejaxrl_4", *arguments, "--env", "jax:CartPole-v1", "--topology", "fused")
    assert found["steps"] >= 8_000 and found["steps_per_second"] > 0
    assert 0.1 < found["compile_seconds"] < 300
