"""The options of `rlframe sweep`: those of `rlframe train`, and which of them differ between trials.

`rlframe sweep --vary learning-rate=1e-4..1e-2:log --vary num-envs=8,16 --trials 20 --agent dqn`, step by step:

1. `train_options.py: read_arguments` makes the experiment that the trials share, and the `SweepOptions`.
2. `completed` fills in defaults; with `--resume`, the options with which the sweep began.
3. `read_varied_options` makes a `VariedOption` of each `--vary`: `VariedOption("num-envs", ("8", "16"))`. It makes the experiments with the
   first values, the second ones and so on, and so raises errors before any run.
4. Each trial chooses values, as `{"learning-rate": "0.0003", "num-envs": "8"}`. `experiment_with` makes its experiment.
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
from rlframe.programs.options.config_file import load_experiment
from rlframe.programs.options.make_experiment import option_value
from rlframe.programs.run_dir.directory import SWEEP, RunDir

PROG = "rlframe sweep"
DESCRIPTION = (
    "Search for values of `rlframe train`'s options that learn best, with Optuna. --vary names an option and its "
    "values, --trials says how many choices to try; every other option is as in `rlframe train`. A trial is one run "
    "for each of --seeds; its value is the interquartile mean of their final returns (of fewer than four seeds the "
    "mean). The best of many trials was partly lucky: report it on other seeds, by the command that is printed at the "
    "end. Ctrl-C saves everything and exits with 130; --resume goes on."
)

KEPT = ("vary", "seeds", "sampler", "trials")  # in sweep.json
_FIXED = ("agent", "env", "seed")  # of the experiment, and not to be varied

_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")
_ALMOST = re.compile(rf"(?:{_NUMBER})?\.\.(?:{_NUMBER})?(?::\w*)?|{_NUMBER}:\w*")  # a range that went wrong


@dataclasses.dataclass(frozen=True)
class SweepOptions(TrainOptions):
    """Options of `rlframe sweep` beside those of an experiment."""

    seeds: Union[str, None] = None  # 1-3 or 1,2,7: each trial is a run for each; None: one run, of --seed
    at_once: int = 1  # how many runs at a time
    resume: bool = False  # continue the sweep in --run-dir; only --trials, --sampler and --at-once may change
    take_over: bool = False  # with --resume: end the sweep that still runs in --run-dir, and continue it here
    # an option of `rlframe train`, and its values; give --vary once for each option. num-epochs=1..8: from this range;
    # learning-rate=1e-4..1e-2:log: the same, drawn by its logarithm; gae-lambda=0.9,0.95,0.98: one of these;
    # "network.hidden=64,64 64": the same, of an option that takes several words (here with --network mlp)
    vary: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="NAME=VALUES")] = ()
    trials: Union[int, None] = None  # how many in all; None: every combination, where nothing has a range
    # how values are chosen. tpe: near those of good trials, after ten at random; random: all at random; grid: every
    # combination; auto: grid without --trials, else tpe
    sampler: Literal["auto", "tpe", "random", "grid"] = "auto"


@dataclasses.dataclass(frozen=True)
class VariedOption:
    """An option and its values, as texts that the command line takes."""

    name: str  # as `learning-rate`, without dashes before it
    values: tuple[str, ...]  # of a range its lowest and highest
    is_range: bool = False
    log: bool = False  # drawn by its logarithm
    whole: bool = False  # of whole numbers, see `typed`

    def typed(self, experiment: Experiment) -> VariedOption:
        """Return the same, with a range of whole numbers if the option is an int in `experiment`.

        Raises:
            UsageError: it has a range, and is no number; or it is a switch, and has other values than True and False.
        """
        value = option_value(experiment, self.name)
        if isinstance(value, bool) and not {text.lower() for text in self.values} <= {"true", "false"}:
            raise UsageError(f"--vary {self.name} is a switch: its values are True,False.")
        if not self.is_range or value is None:
            return self
        if not isinstance(value, (int, float)):
            raise UsageError(f"--vary {self.name} has a range, and is no number: list its values, A,B,C.")
        return dataclasses.replace(self, whole=isinstance(value, int))

    def suggest(self, trial: Any) -> str:
        """Return the value of an Optuna trial, which may choose it now."""
        if not self.is_range:
            return trial.suggest_categorical(self.name, self.values)
        suggest, number = (trial.suggest_int, int) if self.whole else (trial.suggest_float, float)
        low, high = map(number, self.values)
        return str(suggest(self.name, low, high, log=self.log))

    def panel(self, values: list[Any]) -> OptionPanel:
        """Return the panel of a plot that shows its values in all trials."""
        if not self.is_range:
            return OptionPanel(self.name, values, self.values)
        return OptionPanel(self.name, values, bounds=(float(self.values[0]), float(self.values[1])), log=self.log)


def parse_varied_option(text: str) -> VariedOption:
    """`learning-rate=1e-4..1e-2:log`, `num-epochs=1..8` or `gae-lambda=0.9,0.95`. Raises UsageError for others."""
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("_", "-")
    found, listed = _RANGE.fullmatch(values.strip()), [value.strip() for value in values.split(",")]
    if not name or not equals or not all(listed) or (found is None and any(map(_ALMOST.fullmatch, listed))):
        raise UsageError(f"--vary is NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=A,B,C, got {text!r}.")
    if found is None:
        return VariedOption(name, tuple(listed))
    low, high, log = found.groups()
    if not float(low) < float(high) or (log and float(low) <= 0):
        least = ", above 0 for a logarithm," if log else ""
        raise UsageError(f"--vary {text}: a range goes from a number{least} to a higher one.")
    return VariedOption(name, (low, high), is_range=True, log=log is not None)


def completed(experiment: Experiment, options: SweepOptions, directory: RunDir) -> SweepOptions:
    """Return the options with their defaults. A resumed sweep keeps the options that it began with.

    Raises:
        UsageError: the options are of another sweep, or there is none in the directory.
    """
    if not options.resume:
        return dataclasses.replace(options, seeds=options.seeds or str(experiment.seed))
    directory.check_kind(SWEEP)
    kept = json.loads((directory.path / SWEEP).read_text())
    kept["vary"] = tuple(kept["vary"])
    given = {name: getattr(options, name) for name in KEPT if getattr(options, name) != getattr(SweepOptions, name)}
    changed = [name for name in KEPT[:2] if given.get(name, kept[name]) != kept[name]]
    if changed or experiment != load_experiment(directory.config):
        raise UsageError(
            f"A resumed sweep keeps its options: leave out of {PROG} --resume --run-dir {directory.path} all but "
            "--trials, --sampler and --at-once, or begin another sweep."
        )
    return dataclasses.replace(options, **{**kept, **given})


def read_varied_options(arguments: list[str], experiment: Experiment, options: SweepOptions) -> list[VariedOption]:
    """Return the options to vary. Raise UsageError unless `rlframe train` takes all of their values."""
    parse_seeds(options.seeds or "")
    varied = [parse_varied_option(text).typed(experiment) for text in options.vary]
    if not varied:
        raise UsageError(f"Name what to vary: --vary learning-rate=1e-4..1e-2:log. See `{PROG} --help`.")
    names = [each.name for each in varied]
    for i, name in enumerate(names):
        if name.replace("-", "_") in (*_FIXED, *(field.name for field in dataclasses.fields(SweepOptions))):
            raise UsageError(f"--vary {name}: all trials have the same one; give it by --{name}.")
        if name in names[:i]:
            raise UsageError(f"--vary names {name} twice: give all its values at once.")
    rows = range(max(len(each.values) for each in varied))
    read = [experiment_with(arguments, {each.name: (each.values * len(rows))[i] for each in varied}) for i in rows]
    ranges = [each.name for each in varied if each.is_range]
    if options.sampler == "grid" or (options.sampler == "auto" and options.trials is None):
        if ranges:
            raise UsageError(
                f"{ranges[0]} has a range, and a grid has none: say how many --trials, or list its values."
            )
        if options.trials is not None:
            raise UsageError("--sampler grid makes every combination: leave --trials out.")
    elif options.trials is None or options.trials < 1:
        raise UsageError(f"--sampler {options.sampler} needs --trials, at least 1, got {options.trials}.")
    return [each.typed(read[0]) for each in varied]


def experiment_with(arguments: list[str], options: dict[str, str]) -> Experiment:
    """Make the experiment of the command line with these options changed, by reading them behind its arguments."""
    changed = [argument for name, value in options.items() for argument in _as_arguments(name, value)]
    return read_arguments([*arguments, *changed], SweepOptions, PROG, DESCRIPTION)[0]


def _as_arguments(name: str, value: str) -> list[str]:
    group, dot, own = name.rpartition(".")
    if value.lower() in ("true", "false"):
        return [f"--{group}{dot}{'no-' * (value.lower() == 'false')}{own}"]
    words = value.split()  # `network.hidden=64 64,256` has two of one option, and one
    return [f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words]
