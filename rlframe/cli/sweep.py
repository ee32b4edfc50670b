"""`rlframe sweep`: which values of the options of `rlframe train` learn best, by Optuna."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys

from rlframe import extras
from rlframe.cli.listings import print_preset
from rlframe.cli.several_runs import check_options_of_several_runs, lock_several_runs, parse_seeds, run_all
from rlframe.cli.train_options import read_arguments
from rlframe.cli.trials import SweepOptions, Trials, Varied, parse_varied
from rlframe.errors import UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.config_file import load_experiment, save_experiment
from rlframe.programs.run_dir.directory import SWEEP, RunDir, default_path

PROG = "rlframe sweep"
DESCRIPTION = (
    "Search for values of `rlframe train`'s options that learn best, with Optuna. --vary names an option and its "
    "values, --trials says how many choices to try; every other option is as in `rlframe train`. A trial is one run "
    "for each of --seeds; its value is the interquartile mean of their final returns (of fewer than four seeds the "
    "mean). The best of many trials was partly lucky: report it on other seeds, by the command that is printed at the "
    "end. Ctrl-C saves everything and exits with 130; --resume goes on."
)

_KEPT = ("vary", "seeds", "sampler", "trials")  # in sweep.json
_FIXED = ("agent", "env", "seed")  # of the experiment, and not to be varied


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    import setproctitle

    experiment, options, preset = read_arguments(arguments, SweepOptions, PROG, DESCRIPTION)
    assert isinstance(options, SweepOptions)
    extras.require(PROG, "sweep")
    check_options_of_several_runs(experiment, options, PROG)
    path = default_path(experiment)
    directory = RunDir(options.run_dir if options.run_dir is not None else path.with_name(f"sweep-{path.name}"))
    options = _completed(experiment, options, directory)
    varied = _varied_options(arguments, experiment, options)
    setproctitle.setproctitle("rlframe: sweep")
    if preset is not None and not options.quiet:
        print_preset(preset, experiment, sys.stderr)
    if not options.resume:
        directory.create()
    with lock_several_runs(directory, experiment, options):
        if not options.resume:
            directory.create()  # check again: another process may have used it before the lock
        kept = {name: getattr(options, name) for name in _KEPT}
        write_atomically(directory.path / SWEEP, json.dumps(kept), "\n")
        if not options.resume:
            save_experiment(experiment, directory.config, {})
        trials = Trials(varied, functools.partial(_experiment, arguments), experiment, options, directory.path)
        stopped_by = run_all(trials.next_run, trials.ended, options.at_once)
    trials.report()
    if stopped_by is None:
        return 0
    print(f"Everything is saved. Go on: {directory.resume_command}", file=sys.stderr)
    return 128 + stopped_by


def _completed(experiment: Experiment, options: SweepOptions, directory: RunDir) -> SweepOptions:
    """Return the options with their defaults. A resumed sweep keeps the options that it began with.

    Raises:
        UsageError: the options are of another sweep, or there is none in the directory.
    """
    if not options.resume:
        return dataclasses.replace(options, seeds=options.seeds or str(experiment.seed))
    directory.check_holds(SWEEP)
    kept = json.loads((directory.path / SWEEP).read_text())
    kept["vary"] = tuple(kept["vary"])
    given = {name: getattr(options, name) for name in _KEPT if getattr(options, name) != getattr(SweepOptions, name)}
    changed = [name for name in _KEPT[:2] if given.get(name, kept[name]) != kept[name]]
    if changed or experiment != load_experiment(directory.config):
        raise UsageError(
            f"A resumed sweep keeps its options: leave out of {PROG} --resume --run-dir {directory.path} all but "
            "--trials, --sampler and --at-once, or begin another sweep."
        )
    return dataclasses.replace(options, **{**kept, **given})


def _varied_options(arguments: list[str], experiment: Experiment, options: SweepOptions) -> list[Varied]:
    """Return the options to vary. Raise UsageError unless `rlframe train` takes all of their values."""
    parse_seeds(options.seeds or "")
    varied = [parse_varied(text).typed(experiment) for text in options.vary]
    if not varied:
        raise UsageError(f"Name what to vary: --vary learning-rate=1e-4..1e-2:log. See `{PROG} --help`.")
    names = [each.name for each in varied]
    for i, name in enumerate(names):
        if name.replace("-", "_") in (*_FIXED, *(field.name for field in dataclasses.fields(SweepOptions))):
            raise UsageError(f"--vary {name}: all trials have the same one; give it by --{name}.")
        if name in names[:i]:
            raise UsageError(f"--vary names {name} twice: give all its values at once.")
    rows = range(max(len(each.values) for each in varied))
    read = [_experiment(arguments, {each.name: (each.values * len(rows))[i] for each in varied}) for i in rows]
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


def _experiment(arguments: list[str], options: dict[str, str]) -> Experiment:
    """Make the experiment of the command line with these options changed."""
    changed = [argument for name, value in options.items() for argument in _as_arguments(name, value)]
    return read_arguments([*arguments, *changed], SweepOptions, PROG, DESCRIPTION)[0]


def _as_arguments(name: str, value: str) -> list[str]:
    group, dot, own = name.rpartition(".")
    if value.lower() in ("true", "false"):
        return [f"--{group}{dot}{'no-' * (value.lower() == 'false')}{own}"]
    words = value.split()  # `network.hidden=64 64,256` has two of one option, and one
    return [f"--{name}={words[0]}"] if len(words) == 1 else [f"--{name}", *words]
