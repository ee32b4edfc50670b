"""The options of `rlframe sweep`: the options of `rlframe train`, and the options that vary between trials.

`rlframe sweep --vary learning-rate=1e-4..1e-2:log --vary num-envs=8,16 --trials 20 --agent dqn`, step by step:

1. `train_options.py: read_arguments` returns the experiment that all trials share, and the `SweepOptions`.
2. `with_defaults` fills in the defaults. With `--resume`, it fills in the saved options of the sweep.
3. `read_varied_options` parses each `--vary` to a `VariedOption`: `VariedOption("num-envs", ("8", "16"))`. To find
   invalid values before any run, it also creates an experiment with the first value of each option, then with the
   second value of each option, and so on.
4. Each trial chooses values, such as `{"learning-rate": "0.0003", "num-envs": "8"}`. `experiment_with` creates its
   experiment.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Annotated, Any, Literal, Union

import tyro

from rlframe.cli.multi_run import parse_seeds
from rlframe.cli.train_options import TrainOptions, read_arguments
from rlframe.errors import UsageError
from rlframe.metrics.plots import OptionPanel
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.make_experiment import option_value
from rlframe.programs.options.saved_experiment import load_experiment
from rlframe.programs.run_dir.directory import SWEEP, RunDir

PROG = "rlframe sweep"
DESCRIPTION = (
    "Search for the best values of `rlframe train`'s options, with Optuna. --vary gives an option and its values, and "
    "--trials the number of combinations to try. All other options are the options of `rlframe train`. A trial is one "
    "run for each of --seeds. The value of a trial is the interquartile mean of its final returns, or the mean with "
    "fewer than four seeds. The best of many trials is partly luck: test it on other seeds with the command that is "
    "printed at the end. Ctrl-C saves everything and exits with 130; --resume continues the sweep."
)

SAVED_OPTIONS = ("vary", "seeds", "sampler", "trials")  # saved in sweep.json
_FIXED = ("agent", "env", "seed")  # options of an experiment that cannot vary

_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")
_MALFORMED_RANGE = re.compile(rf"(?:{_NUMBER})?\.\.(?:{_NUMBER})?(?::\w*)?|{_NUMBER}:\w*")


@dataclasses.dataclass(frozen=True)
class SweepOptions(TrainOptions):
    """Options of `rlframe sweep`, without the options of the experiment."""

    help_group = "Sweep"

    seeds: Union[str, None] = None  # Seeds of each trial, such as 1-3 or 1,2,7. None means only the seed of --seed.
    at_once: int = 1  # Number of runs at a time.
    resume: bool = False  # Continue the sweep in --run-dir. Only --trials, --sampler and --at-once may change.
    take_over: bool = False  # With --resume: end the process that runs the sweep in --run-dir, and continue it here.
    # An option of `rlframe train` and its values. Repeat --vary to add options. num-epochs=1..8: a range;
    # learning-rate=1e-4..1e-2:log: a range with log-uniform sampling; gae-lambda=0.9,0.95,0.98: a list;
    # "network.hidden=64,64 64": a list for an option of several words (with --network mlp).
    vary: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=VALUES")] = ()
    trials: Union[int, None] = None  # Total number of trials. None means all combinations, which needs lists.
    # Method that chooses the values. tpe: ten random trials, then values near good trials; random: at random; grid:
    # all combinations; auto: grid without --trials, otherwise tpe.
    sampler: Literal["auto", "tpe", "random", "grid"] = "auto"


@dataclasses.dataclass(frozen=True)
class VariedOption:
    """An option that varies between trials, and its values, as text for the command line."""

    name: str  # such as `learning-rate`, without leading dashes
    values: tuple[str, ...]  # the list of values, or the lowest and highest value of a range
    is_range: bool = False
    log: bool = False  # log-uniform sampling
    whole: bool = False  # whether the range contains only integers; set by `with_range_type`

    def with_range_type(self, experiment: Experiment) -> VariedOption:
        """Return a copy. If the option is an int in `experiment`, the copy's range contains only integers.

        Raises:
            UsageError: the option has a range but is not a number, or it is a switch with a value that is not a bool.
        """
        value = option_value(experiment, self.name)
        if isinstance(value, bool) and not {text.lower() for text in self.values} <= {"true", "false"}:
            raise UsageError(f"--vary {self.name} is a switch: its values must be True,False.")
        if not self.is_range or value is None or isinstance(value, str):  # str: the default may be a schedule
            return self
        if not isinstance(value, (int, float)):
            raise UsageError(f"--vary {self.name} has a range but is not a number. List its values: A,B,C.")
        return dataclasses.replace(self, whole=isinstance(value, int))

    def suggest(self, trial: Any) -> str:
        """Return the option's value in an Optuna trial. The first call in a trial chooses the value."""
        if not self.is_range:
            return trial.suggest_categorical(self.name, self.values)
        suggest, number = (trial.suggest_int, int) if self.whole else (trial.suggest_float, float)
        low, high = map(number, self.values)
        return str(suggest(self.name, low, high, log=self.log))

    def panel(self, values: list[Any]) -> OptionPanel:
        """Return a plot panel with the option's values in all trials."""
        if not self.is_range:
            return OptionPanel(self.name, values, self.values)
        return OptionPanel(self.name, values, bounds=(float(self.values[0]), float(self.values[1])), log=self.log)


def parse_varied_option(text: str) -> VariedOption:
    """Parse `learning-rate=1e-4..1e-2:log`, `num-epochs=1..8` or `gae-lambda=0.9,0.95`.

    Raises:
        UsageError: the text has a different format, or the first number of a range is not below the second.
    """
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("_", "-")
    found, listed = _RANGE.fullmatch(values.strip()), [value.strip() for value in values.split(",")]
    if not name or not equals or not all(listed) or (found is None and any(map(_MALFORMED_RANGE.fullmatch, listed))):
        raise UsageError(f"--vary must look like NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=A,B,C, got {text!r}.")
    if found is None:
        return VariedOption(name, tuple(listed))
    low, high, log = found.groups()
    if not float(low) < float(high) or (log and float(low) <= 0):
        least = " (above 0 with :log)" if log else ""
        raise UsageError(f"--vary {text}: a range must go from a number{least} to a higher number.")
    return VariedOption(name, (low, high), is_range=True, log=log is not None)


def with_defaults(experiment: Experiment, options: SweepOptions, directory: RunDir) -> SweepOptions:
    """Return the options with defaults filled in. A resumed sweep keeps its saved options.

    Raises:
        UsageError: with `--resume`, if the directory contains no sweep or a sweep with different options.
    """
    if not options.resume:
        return dataclasses.replace(options, seeds=options.seeds or str(experiment.seed))
    directory.check_kind(SWEEP)
    kept = json.loads((directory.path / SWEEP).read_text())
    kept["vary"] = tuple(kept["vary"])
    given = {
        name: getattr(options, name) for name in SAVED_OPTIONS if getattr(options, name) != getattr(SweepOptions, name)
    }
    changed = [name for name in SAVED_OPTIONS[:2] if given.get(name, kept[name]) != kept[name]]
    if changed or experiment != load_experiment(directory.config):
        raise UsageError(
            f"A resumed sweep keeps its options: use {PROG} --resume --run-dir {directory.path} with no other options "
            "than --trials, --sampler and --at-once, or start a new sweep."
        )
    return dataclasses.replace(options, **{**kept, **given})


def read_varied_options(arguments: list[str], experiment: Experiment, options: SweepOptions) -> list[VariedOption]:
    """Return the options to vary. Raise UsageError if `rlframe train` does not accept one of their values."""
    parse_seeds(options.seeds or "")
    varied = [parse_varied_option(text).with_range_type(experiment) for text in options.vary]
    if not varied:
        raise UsageError(f"Name an option to vary: --vary learning-rate=1e-4..1e-2:log. See `{PROG} --help`.")
    names = [each.name for each in varied]
    for i, name in enumerate(names):
        if name.replace("-", "_") in (*_FIXED, *(field.name for field in dataclasses.fields(SweepOptions))):
            raise UsageError(f"--vary {name}: this option must be the same in all trials. Set it with --{name}.")
        if name in names[:i]:
            raise UsageError(f"--vary {name} is given twice: give all its values in one --vary.")
    rows = range(max(len(each.values) for each in varied))
    read = [experiment_with(arguments, {each.name: (each.values * len(rows))[i] for each in varied}) for i in rows]
    ranges = [each.name for each in varied if each.is_range]
    if options.sampler == "grid" or (options.sampler == "auto" and options.trials is None):
        if ranges:
            raise UsageError(
                f"{ranges[0]} has a range, but a grid needs lists. Give the number of --trials, or list the values."
            )
        if options.trials is not None:
            raise UsageError("--sampler grid tries all combinations: leave --trials out.")
    elif options.trials is None or options.trials < 1:
        raise UsageError(f"--sampler {options.sampler} needs --trials, at least 1, got {options.trials}.")
    return [each.with_range_type(read[0]) for each in varied]


def experiment_with(arguments: list[str], options: dict[str, str]) -> Experiment:
    """Append options to the arguments of the command line. Return the experiment that the result describes."""
    changed = [argument for name, value in options.items() for argument in _as_arguments(name, value)]
    return read_arguments([*arguments, *changed], SweepOptions, PROG, DESCRIPTION)[0]


def _as_arguments(name: str, value: str) -> list[str]:
    group, dot, own = name.rpartition(".")
    if value.lower() in ("true", "false"):
        return [f"--{group}{dot}{'no-' * (value.lower() == 'false')}{own}"]
    words = value.split()  # `network.hidden=64 64,256` has the values "64 64" (two words) and "256"
    return [f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words]
