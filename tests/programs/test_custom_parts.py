"""Users can give custom topologies, engines and replay buffers as `file.py:name`, like agents and environments."""

from __future__ import annotations

import json
import pathlib

import pytest

from rlframe.cli.main import main
from rlframe.cli.train_options import read_arguments
from rlframe.errors import UsageError
from rlframe.programs import load_experiment, make_experiment, run_experiment
from rlframe.programs.options.make_experiment import change_options
from rlframe.programs.options.saved_experiment import save_experiment

CUSTOM_PARTS = """
import dataclasses
import pathlib

from rlframe.actors import Actor
from rlframe.engines.threads import ThreadsEngine
from rlframe.inferencers import Inferencer
from rlframe.learners import Learner
from rlframe.programs.training.game_monitor import GameMonitor
from rlframe.programs.topologies import GameProgram, configured_by
from rlframe.programs.topologies.makers import actor_options, add_replay, env_builder, inferencer_config, learner_config
from rlframe.replay import ReplayBuffer


class RecordingEngine(ThreadsEngine):
    def add(self, group, constructor, *args, **kwargs):
        with (pathlib.Path(__file__).parent / "nodes").open("a") as file:
            file.write(f"{group}\\n")
        return super().add(group, constructor, *args, **kwargs)


class Store(ReplayBuffer):
    def __init__(self, agent, **options):
        (pathlib.Path(__file__).parent / "store").write_text(str(options["capacity"]))
        super().__init__(agent, **options)


@dataclasses.dataclass(frozen=True)
class Twice(GameProgram):
    name: str = "twice"
    inferencers_per_actor: int = 1


@configured_by(Twice)
def twice(engine, session):
    replay_buffer = add_replay(engine, session)
    learner = engine.add("learner", Learner, learner_config(session), session.agent, replay_buffer)
    actors = []
    for rank in range(session.topology_config.num_actors):
        for _ in range(session.topology_config.inferencers_per_actor):
            inferencer = engine.add("inferencer", Inferencer, inferencer_config(session), session.agent, learner)
        builder = env_builder(session.experiment)
        actors.append(engine.add("actor", Actor, builder, inferencer, replay_buffer, rank, **actor_options(session)))
    engine.add("monitor", GameMonitor, session, learner, actors)
"""
SMALL = "--agent impala --env-type loop --num-envs 4 --steps 400 --unroll-length 8 --batch-size 4 --eval-episodes 1"


@pytest.fixture
def custom(tmp_path):
    (tmp_path / "custom.py").write_text(CUSTOM_PARTS)
    return tmp_path / "custom.py"


def test_run_uses_custom_topology_engine_and_replay_from_a_file(custom, tmp_path, capsys):
    named = ["--topology", f"{custom}:twice", "--engine", f"{custom}:RecordingEngine", "--replay", f"{custom}:Store"]
    options = [*SMALL.split(), "--network", "mlp", "--network.hidden", "8", "--inferencers-per-actor", "2"]
    run_dir = tmp_path / "run"
    assert main(["train", *options, *named, "--run-dir", str(run_dir), "--quiet", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["env_steps"] >= 400 and result["learner_steps"] > 0
    nodes = (tmp_path / "nodes").read_text().split()
    assert nodes == ["learner", *["inferencer", "inferencer", "actor"] * 2, "monitor"]
    assert (tmp_path / "store").exists()
    topology = load_experiment(run_dir).topology_config
    assert (topology.name, topology.inferencers_per_actor) == (f"{custom}:twice", 2)
    repeated, _, _ = read_arguments(["--config", str(run_dir / "config.json")])
    assert repeated == load_experiment(run_dir)


def test_option_of_a_custom_topology_is_refused_for_other_topologies(custom):
    with pytest.raises(UsageError, match="There is no option --inferencers-per-actor"):
        read_arguments(["--inferencers-per-actor", "2"])
    with pytest.raises(
        UsageError, match=f"replay_checkpoint_every=5 is for the topology single_process: {custom}:twice"
    ):
        make_experiment("impala", topology=f"{custom}:twice", replay_checkpoint_every=5)


def test_saved_custom_topology_can_be_replaced_if_its_options_have_default_values(custom, tmp_path):
    config = tmp_path / "config.json"
    save_experiment(make_experiment("impala", topology=f"{custom}:twice", inferencers_per_actor=2), config, {})
    other = ["--config", str(config), "--topology", "heavy_env"]
    refused = f"^inferencers_per_actor=2 is for the topology {custom}:twice: heavy_env does not use it. Set it to 1"
    with pytest.raises(UsageError, match=refused):
        read_arguments(other)
    with pytest.raises(UsageError, match=refused):
        change_options(load_experiment(config), {"topology": "heavy_env"})
    changed, _, _ = read_arguments([*other, "--inferencers-per-actor", "1"])
    assert changed == make_experiment("impala", topology="heavy_env")
    assert changed == change_options(load_experiment(config), {"topology": "heavy_env", "inferencers_per_actor": 1})


def test_invalid_names_of_custom_parts_raise_clear_errors(custom):
    with pytest.raises(UsageError, match="custom.py defines no 'thrice'"):
        make_experiment("impala", topology=f"{custom}:thrice")
    with pytest.raises(UsageError, match="There is no engine 'thread'.*Did you mean 'threads'"):
        make_experiment("impala", topology="heavy_env", engine="thread")
    with pytest.raises(UsageError, match="An engine needs the methods of rlframe.engines.Engine"):
        make_experiment("impala", topology="heavy_env", engine=f"{custom}:Store")
    with pytest.raises(UsageError, match="for agents that learn from steps. This agent learns from trajectories"):
        make_experiment("grpo", topology=f"{custom}:twice")


@pytest.mark.system
def test_resumed_run_with_the_custom_replay_of_the_example_fills_it_again(tmp_path):
    store = pathlib.Path(__file__).parents[2] / "examples" / "custom_replay_store.py"
    small = (
        "--agent dqn --preset none --env-type loop --num-envs 2 --min-replay-size 64 --batch-size 32 --eval-episodes 1"
    )
    options = [*small.split(), "--replay", f"{store}:ListReplay", "--quiet", "--run-dir", str(tmp_path / "run")]
    assert main(["train", *options, "--steps", "400", "--stop-at", "200"]) == 0
    assert main(["train", "--resume", "--quiet", "--run-dir", str(tmp_path / "run")]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["env_steps"] >= 400 and result["learner_steps"] > 0


def test_replay_class_that_is_not_a_buffer_is_refused(tmp_path):
    (tmp_path / "custom.py").write_text("class Store: pass\n")
    with pytest.raises(UsageError, match="Store'>, which is not a subclass of rlframe.replay.BaseReplayBuffer"):
        run_experiment(make_experiment("dqn", replay=f"{tmp_path / 'custom.py'}:Store"), run_dir=tmp_path / "run")
