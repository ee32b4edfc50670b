"""`rlframe.train` accepts the options of `rlframe train`, converts their values and refuses invalid ones."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any, ClassVar, Literal, Union

import numpy as np
import pytest

import rlframe
from rlframe.agents import PPOConfig
from rlframe.agents.dqn_heads import Categories, Quantiles
from rlframe.cli.main import main
from rlframe.cli.train_options import TrainOptions, read_arguments
from rlframe.errors import UsageError
from rlframe.programs import api, make_experiment, runner
from rlframe.programs.api import SessionOptions
from rlframe.programs.options import registry
from rlframe.programs.options.fields import (
    check_numbers,
    field_names,
    flat_fields,
    from_jsonable,
    option,
    parse_ids,
    to_jsonable,
    with_choices,
)
from rlframe.programs.options.make_experiment import config_classes, to_flat
from rlframe.programs.options.saved_experiment import load_experiment, save_experiment
from rlframe.programs.run_dir.directory import Result
from rlframe.programs.topologies.config import find_topology

OTHERS = ("dqn", "impala", "pqn", "r2d2", "sac", "td3")
NETWORKS = {"grpo": []}  # agent -> arguments for the network; the default is `--network mlp`


@pytest.fixture
def asked(monkeypatch):
    """Replace `runner.run_experiment` by a fake. Return a list that collects its calls as (experiment, options)."""
    calls = []

    def train(experiment, **options):
        calls.append((experiment, options))
        return Result(0, 0, None, None, 0, 0.0, 0.0, 0, str(options["run_dir"]))

    monkeypatch.setattr(runner, "run_experiment", train)
    return calls


def flags(capsys, agent: str) -> list[str]:
    """Return the names of all options in the output of `rlframe train --help`."""
    assert main(["train", "--agent", agent, *network(agent), "--help"]) == 0
    flags = re.findall(r"^  --(\S+)", capsys.readouterr().out, re.MULTILINE)
    return [each for flag in flags for each in {flag.replace("[no-]", ""): 0, flag.replace("[no-]", "no-"): 0}]


def network(agent: str) -> list[str]:
    return NETWORKS.get(agent, ["--network", "mlp"])


def defaults(agent: str) -> dict[str, object]:
    """Return a dict from the name of each option to its default value."""
    experiment, options, _ = read_arguments(["--agent", agent, *network(agent)])
    values = {name: each for cls in config_classes(agent).values() for name, each in flat_fields(cls()).items()}
    values.update(to_flat(experiment))
    agent_config, network_config = values.pop("agent_config"), values.pop("network_config", None)
    values.update(flat_fields(agent_config), **flat_fields(options))
    values["async"] = values.pop("async_envs", None)
    parts = {name: getattr(agent_config, name, None) for name in ("model", "head")}
    for prefix, config in {"network": network_config, **parts}.items():
        values.update(
            {f"{prefix}.{name}": each for name, each in ({} if config is None else flat_fields(config)).items()}
        )
    return values


@pytest.mark.parametrize("agent", ["ppo", "grpo", *(pytest.param(each, marks=pytest.mark.system) for each in OTHERS)])
def test_train_function_accepts_each_option_of_the_train_command(agent, asked, capsys):
    values = defaults(agent)
    found, given = set(), {}
    for flag in flags(capsys, agent):
        name = flag.replace("-", "_")
        if name in ("help", "agent"):
            continue
        if name not in values:  # a flag with "no" turns an option off: --no-NAME or --GROUP.no-NAME
            name = name.replace("no_", "", 1)
            assert isinstance(values[name], bool), flag
        found.add(name)
        value = values[name]
        if name in api.COMMAND_LINE_ONLY:
            with pytest.raises(UsageError, match=f"^{name} is an option of the command line only, not of rlframe"):
                rlframe.train(agent, **{name: value})
            assert f"`{name}`" in rlframe.train.__doc__
            continue
        given[name] = value
    for spelled in (given, {name.replace(".", "_"): value for name, value in given.items()}):
        asked.clear()
        rlframe.train(agent, **{**spelled, **({} if agent in NETWORKS else {"network": "mlp"})})
        assert len(asked) == 1
    own = {"model.head_dim"} if agent == "grpo" else {"profile", "discount"}
    assert {"steps", "seeds", "wandb", *own} <= found


def test_command_line_and_script_make_equal_experiments(asked):
    words = "--agent dqn --env Acrobot-v1 --network mlp --network.hidden 32 16 --network.no-orthogonal --seed 3 --async"
    words += ' --env-type process --learning-rate 1 --no-double --eval-env-kwargs {"a":1} --run-dir run --stop-at 5'
    words += " --profile-trace --project mine --take-over --head categorical --head.num-atoms 21"
    experiment, options, _ = read_arguments(words.split())
    rlframe.train("dqn", "Acrobot-v1", network="mlp", agent_config=None, num_envs=experiment.num_envs,
                  **{"network.hidden": [32, 16]}, network_orthogonal=False, seed=3,
                  async_envs=True, env_type="process", learning_rate=1, double=False, eval_env_kwargs={"a": 1},
                  run_dir="run", stop_at=5, profile_trace=True, project="mine", take_over=True,
                  head="categorical", head_num_atoms=21)  # fmt: skip
    ((same, told),) = asked
    assert same == experiment
    assert (str(told["run_dir"]), told["stop_at"], told["take_over"]) == (options.run_dir, 5, True)
    assert told["profile"] is not None and told["notes"] == {"preset": "dqn/acrobot"}


def test_changed_head_option_keeps_other_head_values_of_the_preset(asked, tmp_path):
    assert make_experiment("dqn", head=Categories(5)).agent_config.head == Categories(5)
    rainbow = make_experiment("dqn", "Pong-v5", preset="dqn/rainbow_atari", head="categorical", head_value_max=5)
    assert rainbow.agent_config.head == Categories(51, -10.0, 5.0)
    quantiles = make_experiment("dqn", "Pong-v5", preset="dqn/rainbow_atari", head="quantiles")
    assert quantiles.agent_config.head == Quantiles()
    save_experiment(rainbow, tmp_path / "config.json", {})
    assert json.loads((tmp_path / "config.json").read_text())["experiment"]["agent_config"]["head"]["value_max"] == 5.0
    assert load_experiment(tmp_path / "config.json") == rainbow
    rlframe.train(config=tmp_path / "config.json", head_num_atoms=3)
    assert read_arguments(["--config", str(tmp_path / "config.json"), "--head.num-atoms", "3"])[0] == asked[-1][0]
    with pytest.raises(UsageError, match="preset='none' cannot change the saved values"):
        read_arguments(["--config", str(tmp_path / "config.json"), "--preset", "none"])
    assert asked[-1][0].agent_config.head == Categories(3, -10.0, 5.0)
    for wrong, message in {
        "c51": "head: expected 'expectation' or 'quantiles' or 'categorical', got 'c51' (str).",
        3: "head: expected 'expectation' or 'quantiles' or 'categorical', got 3 (int).",
    }.items():
        with pytest.raises(UsageError) as raised:
            rlframe.train("dqn", head=wrong)
        assert str(raised.value) == message
    for given in ("num-atoms", "head.num-atoms"):
        with pytest.raises(UsageError, match=rf"no option --{given}. It is an option of --head categorical\.$"):
            read_arguments(["--agent", "dqn", f"--{given}", "3"])
        with pytest.raises(UsageError, match=r"It is an option of head='categorical'\.$"):
            rlframe.train("dqn", **{given.replace("-", "_"): 3})


def test_train_function_accepts_three_names_of_the_async_option(asked):
    for spelled in ("async_envs", "async_", "async"):
        rlframe.train("dqn", **{spelled: True})
    assert [experiment.topology_config.async_envs for experiment, _ in asked] == [True] * 3


def test_options_override_values_of_a_saved_config(asked, tmp_path):
    (tmp_path / "run").mkdir()
    saved = make_experiment("dqn", "Acrobot-v1", seed=7, learning_rate=0.5)
    save_experiment(saved, tmp_path / "run" / "config.json", {})
    rlframe.train(config=tmp_path / "run" / "config.json", seed=8, learning_rate=0.25)
    ((experiment, _),) = asked
    assert experiment == make_experiment("dqn", "Acrobot-v1", seed=8, learning_rate=0.25)
    with pytest.raises(UsageError, match="The config has the agent 'dqn'. The option agent='ppo' cannot change it"):
        rlframe.train("ppo", config=tmp_path / "run")
    with pytest.raises(UsageError, match="resume uses the config.json of the run. Leave config out"):
        rlframe.train(config=tmp_path / "run", run_dir=tmp_path / "run", resume=True)
    with pytest.raises(UsageError, match="The config has the agent 'dqn'"):
        rlframe.train("ppo", run_dir=tmp_path / "run", resume=True)


OWN = """
import dataclasses
from rlframe.agents import PPO, PPOConfig

@dataclasses.dataclass(frozen=True)
class Config(PPOConfig):
    learning_rate: float = {value}

class Mine(PPO):
    config_cls = Config

def make_net(observation_spec, action_spec):
    return {value}

def wire(engine, run):
    return {value}
"""


def test_next_run_reloads_changed_user_files(asked, tmp_path):
    files = {name: tmp_path / f"{name}.py" for name in ("agent", "network", "topology")}
    for value in (0.25, 0.0625):
        for file in files.values():
            file.write_text(OWN.format(value=value))
        rlframe.train(f"{files['agent']}:Mine", network=f"{files['network']}:make_net",
                      topology=f"{files['topology']}:wire")  # fmt: skip
        experiment, _ = asked[-1]
        assert experiment.agent_config.learning_rate == value
        assert registry.network_factory(experiment.topology_config.network, None)(None, None) == value
        assert find_topology(experiment.topology_config.name)(None, None) == value


@pytest.mark.system
def test_resumed_run_keeps_its_options(tmp_path):
    small = {"num_envs": 2, "steps": 64, "unroll_length": 16, "num_minibatches": 2, "eval_episodes": 0, "quiet": True}
    rlframe.train("ppo", "gymnasium:CartPole-v1", run_dir=tmp_path / "run", learning_rate=0.5, network="mlp",
                  network_hidden=(8,), preset="none", **small)  # fmt: skip
    more = rlframe.train("ppo", "gymnasium:CartPole-v1", run_dir=tmp_path / "run", resume=True, learning_rate=0.5,
                         network_hidden=[8], **{**small, "steps": 96})  # fmt: skip
    assert more.env_steps == 96
    with pytest.raises(UsageError, match=r"started with learning_rate = 0\.5; a resumed run cannot change it to 0\.25"):
        rlframe.train(run_dir=tmp_path / "run", resume=True, learning_rate=0.25)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"discount": lambda step: 1e-3}, "discount: expected float, got the function <lambda>."),
        ({"discount": "linear:0.9:0.99"}, "discount: expected float, got 'linear:0.9:0.99' (str)."),
        ({"learning_rate": "1e-3"}, "PPOConfig.learning_rate: '1e-3' is not a schedule. Expected a number, or "
         "constant:VALUE, linear:START:END, cosine:START:END, piecewise:VALUE:VALUE@TIME, or file.py:NAME of a "
         "function."),
        ({"learning_rate": True}, "learning_rate: expected float or str or function, got True."),
        ({"learning_rate": float}, "learning_rate: expected float or str or function, got the class float."),
        ({"num_envs": "8"}, "num_envs: expected int, got '8' (str)."),
        ({"num_envs": 8.5}, "num_envs: expected int, got 8.5."),
        ({"num_envs": None}, "num_envs: expected int, got None."),
        ({"num_envs": np.array([8])}, "num_envs: expected int, got [8] (list)."),
        ({"seed": "one"}, "seed: expected int, got 'one' (str)."),
        ({"env_kwargs": [("a", 1)]}, "env_kwargs: expected dict, got [('a', 1)] (list)."),
        ({"env_kwargs": {1: 2}}, "a name in env_kwargs: expected str, got 1 (int)."),
        ({"check_finite": "no"}, "check_finite: expected bool or None, got 'no' (str)."),
        ({"topology": 3}, "topology: expected str, got 3 (int)."),
        ({"engine": len}, "engine: expected str, got the builtin_function_or_method len."),
        ({"env_type": "threads"}, "env_type: expected 'auto' or 'loop' or 'thread' or 'process' or 'envpool' or 'jax', "
         "got 'threads' (str)."),
        ({"accelerators": "learner"}, "accelerators: expected tuple of 'learner' or 'inferencer' or 'policy', got "
         "'learner' (str)."),
        ({"network": "mlp", "network_hidden": 64}, "network.hidden: expected tuple of int, got 64 (int)."),
        ({"network": "mlp", "network_hidden": [64, "64"]}, "network.hidden: expected int, got '64' (str)."),
        ({"agent_config": 3}, "agent_config: expected an object with the fields of PPOConfig, got 3 (int)."),
        ({"quiet": "yes"}, "quiet: expected bool, got 'yes' (str)."),
        ({"resume": 1}, "resume: expected bool, got 1 (int)."),
        ({"run_dir": 5}, "run_dir: expected str or None, got 5 (int)."),
        ({"stop_at": "10"}, "stop_at: expected int or None, got '10' (str)."),
        ({"http": "on"}, "http: expected 'auto' or int or None, got 'on' (str)."),
        ({"wandb": "yes"}, "wandb: expected bool, got 'yes' (str)."),
        ({"stepz": 3}, "There is no option 'stepz' of an experiment with ppo. Did you mean 'steps'?"),
        ({"callback": print}, "There is no option 'callback' of an experiment with ppo. Did you mean 'callbacks'?"),
        ({"wandbb": True}, "There is no option 'wandbb' of an experiment with ppo. Did you mean 'wandb'?"),
        ({"at-once": 2}, "at_once is an option of the command line only, not of rlframe.train: it applies only to "
         "several seeds, with `rlframe train --seeds`."),
        ({"network": "mlp", "network.hiden": (8,)}, "There is no option 'network.hiden' of an experiment with ppo. Did "
         "you mean 'network.hidden'?"),
        ({"no_async": True}, "There is no option 'no_async' of an experiment with ppo. To turn off a switch, use "
         "async_envs=False."),
        ({"double": True}, "There is no option 'double' of an experiment with ppo. Agents with this option: dqn."),
        ({"network_hidden": (8,)}, "There is no option 'network_hidden' of an experiment with ppo. Only some networks "
         "have this option: choose one of them, such as network='mlp'."),
        ({"async_": True, "async_envs": True}, "The option async_envs is given twice, once as async_envs: give it "
         "once."),
        ({"profile": True, "quiet": True}, "profile prints a table, but quiet=True allows no output. Leave one of "
         "them out."),
    ],
)  # fmt: skip
def test_message_about_an_invalid_option_contains_expected_and_received_values(options, message, asked):
    with pytest.raises(UsageError) as raised:
        rlframe.train("ppo", **options)
    assert str(raised.value) == message
    assert not asked


def test_numpy_values_and_paths_are_converted(asked, tmp_path):
    rlframe.train(
        env=pathlib.Path("CartPole-v1"), run_dir=tmp_path / "run", num_envs=np.int64(4), learning_rate=np.float32(0.5),
        steps=np.int32(500), normalize_rewards=np.bool_(True), network="mlp", network_hidden=np.array([8, 8]),
        discount=np.array(0.5), env_type=np.str_("loop"),
    )  # fmt: skip
    ((experiment, told),) = asked
    config, topology = experiment.agent_config, experiment.topology_config
    assert (experiment.num_envs, experiment.steps, config.learning_rate, config.discount) == (4, 500, 0.5, 0.5)
    assert (topology.normalize_rewards, topology.network_config.hidden, topology.env_type) == (True, (8, 8), "loop")
    assert {type(each) for each in (experiment.num_envs, experiment.steps)} == {int}
    assert {type(each) for each in (config.learning_rate, config.discount)} == {float}
    assert (topology.normalize_rewards is True, type(topology.env_type)) == (True, str)
    assert pathlib.Path(told["run_dir"]) == tmp_path / "run"


def test_values_in_complete_configs_are_checked():
    with pytest.raises(UsageError, match=r"^agent_config\.gae_lambda: expected float, got 'high' \(str\)\.$"):
        make_experiment("ppo", agent_config={"gae_lambda": "high"})
    with pytest.raises(UsageError, match=r"PPOConfig\.num_epochs must be a number, got '8'"):
        PPOConfig(num_epochs="8")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"^network_config\.hidden: expected tuple of int, got 8 \(int\)\.$"):
        make_experiment("ppo", network="mlp", network_config={"hidden": 8})
    assert make_experiment("ppo", agent_config={"num_epochs": 2}).agent_config == PPOConfig(num_epochs=2)


def test_list_of_command_line_only_options_is_complete():
    assert set(field_names(TrainOptions)) - set(field_names(SessionOptions)) == set(api.COMMAND_LINE_ONLY)


# --- conversion of dataclasses to and from JSON


@dataclasses.dataclass(frozen=True)
class Inner:
    sizes: tuple[int, ...] = (64, 64)
    mode: Literal["a", "b"] = "a"


@dataclasses.dataclass(frozen=True)
class Outer:
    rate: float = 0.5
    limit: float | None = None
    count: Union[int, None] = 3
    name: str = "x"
    on: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    inner: Inner = dataclasses.field(default_factory=Inner)


def test_dataclass_round_trips_through_json():
    value = Outer(1e-4, 0.2, None, "y", False, {"a": [1, "b"]}, Inner((1, 2, 3), "b"))
    assert from_jsonable(Outer, json.loads(json.dumps(to_jsonable(value))), "here") == value


@dataclasses.dataclass(frozen=True)
class Model:
    name: str = "small"
    size: int = 1


@dataclasses.dataclass(frozen=True)
class Own:
    """A user's config. It has a class attribute `name`, and Union fields without registered choices."""

    name: ClassVar[str] = "own"
    model: Union[Model, None] = None
    head: Union[Quantiles, Categories, None] = None


@pytest.mark.parametrize("own", [Own(), Own(Model("large", 3), Categories(num_atoms=5)), Own(Model())])
def test_user_config_with_name_fields_round_trips_through_json(own):
    assert from_jsonable(Own, json.loads(json.dumps(to_jsonable(own))), "own") == own
    assert with_choices(own, {"model": "large", "head": "quantiles"}) == own


def test_head_as_object_or_dict_accepts_additional_head_options():
    for head in (Quantiles(5), {"name": "quantiles", "num_quantiles": 5}):
        made = make_experiment("dqn", preset="none", head=head, head_huber_threshold=2.0)
        assert made.agent_config.head == Quantiles(5, 2.0)


def test_int_is_converted_for_float_field():
    rate = from_jsonable(Outer, {"rate": 1, "limit": 2}, "here")
    assert (rate.rate, rate.limit) == (1.0, 2.0)
    assert type(rate.rate) is float and type(rate.limit) is float


def test_arrays_are_written_as_lists():
    assert to_jsonable({"goal": np.array([[1, 2], [3, 4]]), "x": np.array(0.5)}) == {"goal": [[1, 2], [3, 4]], "x": 0.5}


def test_field_with_an_unresolvable_annotation_accepts_any_value():
    @dataclasses.dataclass
    class Local:
        pass

    @dataclasses.dataclass
    class Holder:
        local: Local
        rate: float = 0.5

    assert from_jsonable(Holder, {"local": 3, "rate": "x"}, "here") == Holder(3, "x")  # type: ignore[arg-type]


def test_fields_missing_in_json_get_their_defaults():
    assert from_jsonable(Outer, {}, "here") == Outer()


def test_numpy_scalars_are_written_as_numbers():
    assert to_jsonable({"a": np.float32(0.5), "b": np.int64(3)}) == {"a": 0.5, "b": 3}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rat": 1.0}, "here: Outer has no field 'rat'. Did you mean 'rate'?"),
        ({"rate": "fast"}, "here.rate: expected float, got 'fast' (str)."),
        ({"rate": True}, "here.rate: expected float, got True."),
        ({"count": 1.5}, "here.count: expected int or None, got 1.5."),
        ({"inner": {"mode": "c"}}, "here.inner.mode: expected 'a' or 'b', got 'c' (str)."),
        ({"inner": {"sizes": [1, "2"]}}, "here.inner.sizes: expected int, got '2' (str)."),
        ([], "here: expected an object with the fields of Outer, got [] (list)."),
    ],
)
def test_invalid_json_value_is_refused(values, message):
    with pytest.raises(UsageError) as raised:
        from_jsonable(Outer, values, "here")
    assert str(raised.value) == message


def test_object_that_cannot_be_written_as_json_is_refused():
    with pytest.raises(UsageError, match=r"^config\.json cannot contain <object"):
        to_jsonable({"f": object()})


@dataclasses.dataclass
class Numbers:
    least: int = option(1, at_least=1)
    bound: Union[float, None] = option(None, above=0)
    free: float = -1.0


def test_number_below_its_limit_is_refused():
    check_numbers(Numbers())
    check_numbers(Numbers(least=2, bound=0.5))
    with pytest.raises(UsageError, match=r"Numbers\.least must be at least 1, got 0"):
        check_numbers(Numbers(least=0))
    with pytest.raises(UsageError, match=r"Numbers\.bound must be above 0, got 0\.0"):
        check_numbers(Numbers(bound=0.0))


@pytest.mark.parametrize(
    ("agent", "old", "new"),
    [
        ("ppo", "normalise_advantages", "normalize_advantages"),
        ("ppo", "normalise_observations", "normalize_observations"),
        ("dqn", "prioritised", "prioritized"),
    ],
)
def test_error_for_an_old_config_key_names_the_new_key(agent, old, new, tmp_path):
    path = tmp_path / "config.json"
    save_experiment(make_experiment(agent), path, {})
    content = path.read_text()
    assert f'"{new}"' in content
    path.write_text(content.replace(f'"{new}"', f'"{old}"'))
    with pytest.raises(UsageError, match=f"has no field '{old}'. Did you mean '{new}'?"):
        load_experiment(path)


def test_device_ids_are_numbers_and_ranges():
    assert [parse_ids("ids", text) for text in ("0", "1-3", "4,0-1")] == [(0,), (1, 2, 3), (4, 0, 1)]
    for text in ("", "a", "1-", "1-2-9", "3-1", "3-1,0", "1,1"):
        with pytest.raises(UsageError, match=f"ids must be the ids of devices, .*, got {text!r}"):
            parse_ids("ids", text)
