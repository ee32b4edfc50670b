"""Tests of the output of `--help`: groups of options, hidden options, and the text for an option."""

import dataclasses
from typing import Annotated, Literal, Union

import pytest
import tyro

from rlframe.cli.help import field_comments, format_help, option_fields
from rlframe.cli.main import main


@dataclasses.dataclass(frozen=True)
class Part:
    """A nested config. Its options have the prefix `--part.`."""

    hidden: tuple[int, ...] = (64, 64)  # Sizes of the layers.
    bias: bool = True


@dataclasses.dataclass(frozen=True)
class Options:
    """A config with one option of each kind."""

    name: Annotated[str, tyro.conf.Positional]  # Name of the run.
    # Steps of the run, whose
    # comment has two lines.
    steps: int = 5
    mode: Literal["fast", "slow"] = "fast"
    engine: Literal["local", "launchpad", "ray", "threads"] = "local"  # Engine
    rate: Union[float, None] = None  # None means no limit.
    fresh: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    resume: bool = False
    part: Part = Part()
    secret: Annotated[int, tyro.conf.Suppress] = 3


HELP = """usage: command [OPTIONS] NAME

Run the command.

Arguments:
  NAME                        Name of the run.

Options:
  --steps INT                 Steps of the run, whose comment has two lines. [5]
  --mode fast|slow            [fast]
  --engine NAME               Engine. One of local, launchpad, ray, threads. [local]
  --rate FLOAT                None means no limit.
  --fresh
  --[no-]resume
  --part.hidden INT...        Sizes of the layers. [64 64]
  --part.[no-]bias            [on]"""


def shown(capsys, *arguments):
    """Return the lines that a command prints."""
    assert main(list(arguments)) == 0
    return capsys.readouterr().out.splitlines()


def test_help_has_one_line_per_option_with_its_comment_and_default():
    assert format_help(list(option_fields(Options)), "command", "Run the command.", 100) == HELP


def test_help_shows_a_comment_as_a_sentence_and_keeps_values_and_symbols():
    @dataclasses.dataclass(frozen=True)
    class Texts:
        rate: float = 0.5  # fraction of the steps
        dtype: str = "float32"  # float32 or bfloat16
        exponent: float = 0.6  # alpha
        kept: int = 1  # RUN_DIR of the run.

    assert [field.description() for field in option_fields(Texts())] == [
        "Fraction of the steps. [0.5]",
        "float32 or bfloat16. [float32]",
        "alpha [0.6]",
        "RUN_DIR of the run. [1]",
    ]


def test_help_text_is_wrapped_at_the_width_of_the_terminal():
    lines = format_help(list(option_fields(Options)), "command", "Run the command.", 60).splitlines()
    assert lines[8:10] == [
        "  --steps INT                 Steps of the run, whose",
        " " * 30 + "comment has two lines. [5]",
    ]


def test_help_lists_the_flag_that_turns_a_switch_off():
    flags = [flag for field in option_fields(Options) for flag in field.flags]
    assert flags[-5:] == ["--resume", "--no-resume", "--part.hidden", "--part.bias", "--part.no-bias"]
    assert "--fresh" in flags and "--no-fresh" not in flags


def test_help_shows_the_values_of_a_given_config_as_defaults():
    fields = {field.name: field for field in option_fields(Options("x", steps=7, part=Part((8,))))}
    assert fields["steps"].default == 7 and fields["part.hidden"].description() == "Sizes of the layers. [8]"


def test_help_shows_comments_of_base_classes_and_works_for_a_class_without_source():
    @dataclasses.dataclass(frozen=True)
    class Derived(Options):
        steps: int = 6  # Steps of the derived class.

    comments = field_comments(Derived)
    assert comments["steps"] == "Steps of the derived class." and comments["rate"] == "None means no limit."
    assert field_comments(dataclasses.make_dataclass("Made", ["x"])) == {}


def test_help_lists_options_even_if_their_type_annotations_cannot_be_evaluated():
    made = dataclasses.make_dataclass("Made", [("size", "Missing", 3), ("rate", float, 0.5)])
    assert [field.flag for field in option_fields(made)] == ["--size", "--rate"]


def test_help_of_train_has_at_most_100_lines(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    lines = shown(capsys, "train", "--help")
    assert len(lines) <= 100 and max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("topology", "used", "unused"),
    [
        ("single_process", ["replay-checkpoint-every"], ["engine", "num-actors", "operator", "ray-address"]),
        ("heavy_env", ["engine", "num-actors", "ray-address"], ["operator", "num-inferencers"]),
        ("light_env", ["engine", "num-inferencers"], ["operator", "replay-checkpoint-every"]),
        ("elastic", ["operator", "max-actors"], ["num-inferencers"]),
        (
            "fused",
            ["check-finite", "until-return"],
            ["replay", "env-type", "async", "profile", "engine"],
        ),
    ],
)
def test_help_of_train_hides_options_that_the_topology_does_not_use(topology, used, unused, capsys):
    lines = shown(capsys, "train", "--topology", topology, "--help")
    flags = [line.split()[0] for line in lines if line.startswith("  --")]
    assert {f"--{name}" for name in used} <= {*flags} and not {f"--{name}" for name in unused} & {*flags}
    assert "--steps" in flags and "--learning-rate" in flags and "--total-learner-steps" not in flags
    assert f"--agent ppo, --env CartPole-v1 and --topology {topology}." in " ".join(lines[:8])
    other = "heavy_env" if topology == "single_process" else "single_process"
    assert f"`rlframe train --topology {other} --help`" in " ".join(lines[-3:])


def test_help_of_train_sorts_groups_by_their_number_of_options(capsys):
    lines = shown(capsys, "train", "--agent", "dqn", "--topology", "elastic", "--help")
    counts = {}
    for line in lines:
        if line.endswith(":") and not line.startswith(" "):
            title = line.removesuffix(":")
            counts[title] = 0
        elif line.startswith("  --"):
            counts[title] += 1
    assert {*counts} == {"Run", "Environment", "Processes", "Elastic and cluster", "Logging", "Agent"}
    assert list(counts.values()) == sorted(counts.values())


def test_options_are_in_the_group_of_their_field_or_dataclass(capsys):
    groups, title = {}, ""
    for line in shown(capsys, "train", "--agent", "dqn", "--topology", "elastic", "--help"):
        title = line if line.endswith(":") and not line.startswith(" ") else title
        if line.startswith("  --"):
            groups[line.split()[0].replace("--[no-]", "--")] = title
    assert groups["--env"] == "Environment:"  # `option(group=...)` overrides the group of `Experiment`
    assert groups["--steps"] == groups["--until-return"] == groups["--run-dir"] == "Run:"
    assert groups["--topology"] == groups["--engine"] == groups["--max-restarts"] == groups["--replay"] == "Processes:"
    assert groups["--max-actors"] == "Elastic and cluster:"
    assert groups["--agent"] == groups["--network"] == groups["--learning-rate"] == "Agent:"
