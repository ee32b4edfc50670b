"""`rlframe sweep`: search for the best values of `rlframe train`'s options, with Optuna.

`sweep_options.py` parses the options. `Study` chooses the values of a trial, and `Trials` runs each trial on all seeds.
At the end, `_report` draws the plot and prints the best trial.

With `--vary learning-rate=1e-4..1e-2:log --trials 2 --seeds 1-2`, `multi_run.py: run_all` calls:

    next_run()              # `Study.begin` chooses the learning rate of trial 0. Returns its run with seed 1
    next_run()              # returns the run with seed 2
    ended(first), ended(second)     # after the second run, `Study.complete` records the two returns: trial 0 is done
    next_run()              # begins trial 1
    ...
    next_run()              # None: no trials are left
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe import extras
from rlframe.cli.listings import print_preset
from rlframe.cli.multi_run import SeedRun, check_multi_run_options, lock_multi_run, parse_seeds, run_all
from rlframe.cli.sweep_options import (
    DESCRIPTION,
    PROG,
    SAVED_OPTIONS,
    SweepOptions,
    VariedOption,
    experiment_with,
    read_varied_options,
    with_defaults,
)
from rlframe.cli.train_options import read_arguments
from rlframe.errors import RlframeError, UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.metrics.curves import interquartile_mean, run_name
from rlframe.metrics.plots import plot_options
from rlframe.metrics.terminal import format_number
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.saved_experiment import save_experiment
from rlframe.programs.run_dir.directory import SEEDS, SWEEP, RunDir, default_path


class Study:
    """The Optuna study of a sweep, stored in `study.journal`. It chooses the values of each trial.

    Args:
        directory: directory of the sweep.
        varied: the options that vary between trials.
        options: options of the sweep, with defaults filled in.
        seed: seed of the sampler.
    """

    def __init__(self, directory: pathlib.Path, varied: list[VariedOption], options: SweepOptions, seed: int) -> None:
        self.varied = varied
        self._options, self._seed = options, seed
        with extras.explain_import_error("rlframe sweep", "sweep"):
            import optuna
            from optuna.storages.journal import JournalFileBackend
        self._optuna = optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Optuna's lock is a symbolic link to the journal. Optuna reads the link's target to detect the lock of a killed
        # process, so the path of the journal must be absolute.
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(directory.resolve() / "study.journal")))
        self._study = optuna.create_study(
            storage=storage, study_name="sweep", direction="maximize", load_if_exists=True
        )
        if options.trials is None:
            for values in itertools.product(*(each.values for each in varied)):
                self._study.enqueue_trial(dict(zip([each.name for each in varied], values)), skip_if_exists=True)
        self._unfinished = self.trials("RUNNING")

    def trials(self, state: str) -> list[Any]:
        """Return all trials in the given state, which is RUNNING, WAITING, COMPLETE or FAIL."""
        return [trial for trial in self._study.trials if trial.state.name == state]

    def begin(self) -> Any:
        """Return an Optuna trial: first each unfinished trial of a killed sweep, then new trials, at the end None."""
        count = len(self._study.trials)
        # Each trial has its own sampler, seeded with the number of earlier trials. So a resumed sweep draws the same
        # values as an uninterrupted sweep. A single sampler would draw the first values again after a restart.
        seed = int(np.random.SeedSequence([self._seed, count]).generate_state(1)[0])
        samplers = self._optuna.samplers
        is_random = self._options.sampler == "random"
        self._study.sampler = (samplers.RandomSampler if is_random else samplers.TPESampler)(seed=seed)
        if self._unfinished:
            return self._optuna.trial.Trial(self._study, self._unfinished.pop(0)._trial_id)
        if self.trials("WAITING") or count < (self._options.trials or 0):
            return self._study.ask()
        return None

    def complete(self, trial: Any, returns: list[float], value: float) -> Any:
        """Report the value of a trial to Optuna. Return the best trial so far."""
        trial.set_user_attr("returns", returns)
        self._study.tell(trial, value)
        return self._study.best_trial

    def fail(self, trial: Any, why: str) -> None:
        """Report a failed trial to Optuna. Raise RlframeError if no trial has succeeded so far."""
        trial.set_user_attr("failed", why)
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        if not self.trials("COMPLETE"):
            raise RlframeError(f"Trial {trial.number} failed, and no earlier trial succeeded: {why}")


@dataclasses.dataclass
class _Trial:
    """A trial in progress."""

    optuna_trial: Any
    runs: list[SeedRun]
    waiting: list[SeedRun]  # runs that have not started
    active: list[SeedRun] = dataclasses.field(default_factory=list)  # runs that have started but not ended

    @property
    def name(self) -> str:
        return f"trial {self.optuna_trial.number}"


class Trials:
    """The runs of a sweep's trials. The value of a trial is computed from the returns of its runs.

    Args:
        study: chooses the values of each trial.
        experiment_of: returns the experiment for the options of a trial. Raises UsageError if they are invalid.
        options: options of the sweep, with defaults filled in.
        directory: directory of the sweep.
    """

    def __init__(
        self,
        study: Study,
        experiment_of: Callable[[dict[str, str]], Experiment],
        options: SweepOptions,
        directory: pathlib.Path,
    ) -> None:
        self._study, self._experiment_of, self._directory = study, experiment_of, directory
        # The runs of a killed sweep may still be running. A resumed sweep stops these processes and continues the runs.
        self._options = dataclasses.replace(options, take_over=options.resume)
        self._in_progress: list[_Trial] = []

    def next_run(self) -> SeedRun | None:
        """Return the next run to start, from a trial in progress or from a new trial. None if no runs are left."""
        while True:
            for trial in self._in_progress:
                if trial.waiting:
                    trial.active.append(trial.waiting.pop(0))
                    return trial.active[-1]
            if not self._begin():
                return None

    def ended(self, run: SeedRun) -> None:
        """Record the end of a run. Raise RlframeError if the run failed and no trial has succeeded so far."""
        trial = next((each for each in self._in_progress if run in each.runs), None)
        if trial is None:  # the trial has already failed because of another run
            return
        trial.active.remove(run)
        self._print_progress(f"{trial.name}, seed {run.seed}: {run.outcome()}")
        if run.result is None and not run.was_stopped:
            self._fail(trial, f"seed {run.seed} {run.outcome()}")
        self._finish_if_done(trial)

    def _begin(self) -> bool:
        """Begin or continue a trial. Return False if no trials are left."""
        optuna_trial = self._study.begin()
        if optuna_trial is None:
            return False
        options = {each.name: each.suggest(optuna_trial) for each in self._study.varied}
        path = self._directory / f"trial-{optuna_trial.number}"
        runs = [SeedRun(path, seed, self._options) for seed in parse_seeds(self._options.seeds or "")]
        trial = _Trial(optuna_trial, runs, [run for run in runs if run.result is None])
        self._in_progress.append(trial)
        values = [f"{name} {format_value(value)}" for name, value in optuna_trial.params.items()]
        self._print_progress(f"{trial.name}: {', '.join(values)}")
        try:
            experiment = self._experiment_of(options)
        except UsageError as error:
            self._fail(trial, str(error))
            return True
        path.mkdir(exist_ok=True)
        save_experiment(experiment, path / "config.json", {})
        write_atomically(path / SEEDS, json.dumps({"seeds": self._options.seeds}), "\n")
        self._finish_if_done(trial)  # the runs of a continued trial may all have finished
        return True

    def _finish_if_done(self, trial: _Trial) -> None:
        """If all runs of a trial have finished, report its value."""
        results = [run.result for run in trial.runs]
        returns = [result.return_mean for result in results if result is not None and result.return_mean is not None]
        if trial not in self._in_progress or len(returns) < len(results) or trial.active:
            return
        value = float(interquartile_mean(returns))
        if not math.isfinite(value):
            self._fail(trial, f"the returns are {returns}")
            return
        best = self._study.complete(trial.optuna_trial, returns, value)
        self._in_progress.remove(trial)
        leader = f"the best is {format_number(best.value)}, of trial {best.number}"
        self._print_progress(f"{trial.name}: return {format_number(value)}; {leader}")

    def _fail(self, trial: _Trial, why: str) -> None:
        self._in_progress.remove(trial)
        for run in trial.runs:
            run.stop()
        self._study.fail(trial.optuna_trial, why)
        self._print_progress(f"{trial.name} failed: {why}")

    def _print_progress(self, text: str) -> None:
        if not self._options.quiet:
            print(text, file=sys.stderr, flush=True)


def format_value(value: Any) -> str:
    """Format an option's value. Floats have four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    import setproctitle

    experiment, options, preset = read_arguments(arguments, SweepOptions, PROG, DESCRIPTION)
    assert isinstance(options, SweepOptions)
    extras.require(PROG, "sweep")
    check_multi_run_options(experiment, options, PROG)
    path = default_path(experiment)
    directory = RunDir(options.run_dir if options.run_dir is not None else path.with_name(f"sweep-{path.name}"))
    options = with_defaults(experiment, options, directory)
    varied = read_varied_options(arguments, experiment, options)
    setproctitle.setproctitle("rlframe: sweep")
    if preset is not None and not options.quiet:
        print_preset(preset, experiment, sys.stderr)
    with lock_multi_run(directory, experiment, options):
        kept = {name: getattr(options, name) for name in SAVED_OPTIONS}
        write_atomically(directory.path / SWEEP, json.dumps(kept), "\n")
        study = Study(directory.path, varied, options, experiment.seed)
        trials = Trials(study, functools.partial(experiment_with, arguments), options, directory.path)
        stopped_by = run_all(trials.next_run, trials.ended, options.at_once)
    _report(experiment, options, study, directory.path)
    if stopped_by is None:
        return 0
    print(f"Everything is saved. Resume with: {directory.resume_command}", file=sys.stderr)
    return 128 + stopped_by


def _report(experiment: Experiment, options: SweepOptions, study: Study, directory: pathlib.Path) -> None:
    """Draw sweep.png. Print the trials, best first, and a command that repeats the best trial with new seeds."""
    done = sorted(study.trials("COMPLETE"), key=lambda trial: trial.value, reverse=True)
    if not done:
        return
    failed = study.trials("FAIL")
    title = f"{run_name(experiment.agent, experiment.env)}: {len(done)} trials, the best in orange"
    plot_options(
        [each.panel([trial.params[each.name] for trial in (*done, *failed)]) for each in study.varied],
        [*(trial.value for trial in done), *[None] * len(failed)],
        directory / "sweep.png",
        title + f", and {len(failed)} failed ones (x)" * bool(failed),
    )
    rows = [_row(trial, directory) for trial in (*done, *failed)]
    fresh = max(parse_seeds(options.seeds or "")) + 1
    command = f"rlframe train --config {rows[0]['run_dir']}/config.json --seeds {fresh}-{fresh + 4}"
    if not options.quiet:
        _print_table(study.varied, rows)
        text = f"This is the best of {len(done)} trials on the seeds of the sweep; see {directory / 'sweep.png'}."
        print(f"{text} Test it on other seeds: {command}", file=sys.stderr)
    if options.json:
        best = {**rows[0], "command": command}
        print(json.dumps({"best": best, "trials": rows, "run_dir": str(directory)}), flush=True)


def _row(trial: Any, directory: pathlib.Path) -> dict[str, Any]:
    failed = trial.user_attrs.get("failed")
    return {
        "trial": trial.number,
        "options": trial.params,
        "value": trial.value,
        "returns": trial.user_attrs.get("returns", []),
        **({} if failed is None else {"failed": failed}),
        "run_dir": str(directory / f"trial-{trial.number}"),
    }


def _print_table(varied: list[VariedOption], rows: list[dict[str, Any]]) -> None:
    from rlframe.metrics.terminal import console, table

    names, lines = [each.name for each in varied], []
    for row in rows:
        value = ["failed", ""]
        if row["returns"]:
            several = len(row["returns"]) > 1
            value = [format_number(row["value"]), format_number(float(np.std(row["returns"]))) if several else ""]
        lines.append((str(row["trial"]), *value, *(format_value(row["options"].get(name)) for name in names)))
    console(sys.stderr).print(table(("trial", "return", "± over seeds", *names), lines, right=True))
