"""The trials of `rlframe sweep`: a `Study` chooses the values of each, and `Trials` makes a run for each of its seeds.

With `--vary learning-rate=1e-4..1e-2:log --trials 2 --seeds 1-2`, `multi_run.py: run_all` calls:

    next_run()              # `Study.begin` chooses the learning rate of trial 0; the run of seed 1
    next_run()              # the run of seed 2
    ended(first), ended(second)     # both have ended: `Study.complete` gets their returns, trial 0 is over
    next_run()              # begins trial 1
    ...
    next_run()              # None: no trial is left
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from rlframe import extras
from rlframe.cli.multi_run import SeedRun, parse_seeds
from rlframe.cli.sweep_options import SweepOptions, VariedOption
from rlframe.errors import RlframeError, UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.metrics.curves import interquartile_mean
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.config_file import save_experiment
from rlframe.programs.run_dir.directory import SEEDS


class Study:
    """The trials of a sweep, and the next one: an Optuna study, kept in `study.journal`.

    Args:
        directory: of the sweep.
        varied: the options that differ between trials.
        options: of the sweep, completed.
        seed: of the sampler.
    """

    def __init__(self, directory: pathlib.Path, varied: list[VariedOption], options: SweepOptions, seed: int) -> None:
        self.varied = varied
        self._options, self._seed = options, seed
        with extras.explain_import_error("rlframe sweep", "sweep"):
            import optuna
            from optuna.storages.journal import JournalFileBackend
        self._optuna = optuna
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        # Absolute: its lock is a link to it, and one that a killed process left is known by the file that it leads to.
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(directory.resolve() / "study.journal")))
        self._study = optuna.create_study(
            storage=storage, study_name="sweep", direction="maximize", load_if_exists=True
        )
        if options.trials is None:
            for values in itertools.product(*(each.values for each in varied)):
                self._study.enqueue_trial(dict(zip([each.name for each in varied], values)), skip_if_exists=True)
        self._unfinished = self.trials("RUNNING")

    def trials(self, state: str) -> list[Any]:
        """Return Optuna's trials in a state: RUNNING, WAITING, COMPLETE or FAIL."""
        return [trial for trial in self._study.trials if trial.state.name == state]

    def begin(self) -> Any:
        """Return a trial that a killed sweep left unfinished, else a new one; None if none is left."""
        count = len(self._study.trials)
        # One sampler a trial, so that a resumed sweep draws as one that was not interrupted, and not the same again.
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
        """Give Optuna the value of a trial, and return the best trial so far."""
        trial.set_user_attr("returns", returns)
        self._study.tell(trial, value)
        return self._study.best_trial

    def fail(self, trial: Any, why: str) -> None:
        """Tell Optuna that a trial failed. Raise RlframeError if none has ended well so far."""
        trial.set_user_attr("failed", why)
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        if not self.trials("COMPLETE"):
            raise RlframeError(f"No trial has ended well, and trial {trial.number} failed: {why}")


@dataclasses.dataclass
class _Trial:
    """One choice of values, under way."""

    optuna_trial: Any
    runs: list[SeedRun]
    waiting: list[SeedRun]  # those that have not begun
    going: list[SeedRun] = dataclasses.field(default_factory=list)  # those that have begun and not ended

    @property
    def name(self) -> str:
        return f"trial {self.optuna_trial.number}"


class Trials:
    """Makes the runs of each trial, one after another, and the value of a trial from their returns.

    Args:
        study: chooses the values.
        experiment_of: returns the experiment of a trial for its options. Raises UsageError if they do not fit.
        options: the options of the sweep, completed.
        directory: of the sweep.
    """

    def __init__(
        self,
        study: Study,
        experiment_of: Callable[[dict[str, str]], Experiment],
        options: SweepOptions,
        directory: pathlib.Path,
    ) -> None:
        self._study, self._experiment_of, self._directory = study, experiment_of, directory
        # The runs of a killed sweep are still running: a resumed one ends them and continues them.
        self._options = dataclasses.replace(options, take_over=options.resume)
        self._under_way: list[_Trial] = []

    def next_run(self) -> SeedRun | None:
        """Return the next run of a trial under way, or of a new one; None once the last trial has begun."""
        while True:
            for trial in self._under_way:
                if trial.waiting:
                    trial.going.append(trial.waiting.pop(0))
                    return trial.going[-1]
            if not self._begin():
                return None

    def ended(self, run: SeedRun) -> None:
        """Take the end of a run. Raise RlframeError if it failed and no trial has ended well."""
        trial = next((each for each in self._under_way if run in each.runs), None)
        if trial is None:  # another run of it failed
            return
        trial.going.remove(run)
        self._say(f"{trial.name}, seed {run.seed}: {run.outcome()}")
        if run.result is None and not run.was_stopped:
            self._fail(trial, f"seed {run.seed} {run.outcome()}")
        self._settle(trial)

    def _begin(self) -> bool:
        """Begin a trial, or continue one. Return False if none is left."""
        optuna_trial = self._study.begin()
        if optuna_trial is None:
            return False
        options = {each.name: each.suggest(optuna_trial) for each in self._study.varied}
        path = self._directory / f"trial-{optuna_trial.number}"
        runs = [SeedRun(path, seed, self._options) for seed in parse_seeds(self._options.seeds or "")]
        trial = _Trial(optuna_trial, runs, [run for run in runs if run.result is None])
        self._under_way.append(trial)
        values = [f"{name} {short(value)}" for name, value in optuna_trial.params.items()]
        self._say(f"{trial.name}: {', '.join(values)}")
        try:
            experiment = self._experiment_of(options)
        except UsageError as error:
            self._fail(trial, str(error))
            return True
        path.mkdir(exist_ok=True)
        save_experiment(experiment, path / "config.json", {})
        write_atomically(path / SEEDS, json.dumps({"seeds": self._options.seeds}), "\n")
        self._settle(trial)  # of one that was under way all runs may be over
        return True

    def _settle(self, trial: _Trial) -> None:
        """Tell Optuna the value of a trial once all its runs are finished."""
        results = [run.result for run in trial.runs]
        returns = [result.return_mean for result in results if result is not None and result.return_mean is not None]
        if trial not in self._under_way or len(returns) < len(results) or trial.going:
            return
        value = float(interquartile_mean(returns))
        if not math.isfinite(value):
            self._fail(trial, f"the returns are {returns}")
            return
        best = self._study.complete(trial.optuna_trial, returns, value)
        self._under_way.remove(trial)
        self._say(f"{trial.name}: return {value:.1f}; the best is {best.value:.1f}, of trial {best.number}")

    def _fail(self, trial: _Trial, why: str) -> None:
        self._under_way.remove(trial)
        for run in trial.runs:
            run.stop()
        self._study.fail(trial.optuna_trial, why)
        self._say(f"{trial.name} failed: {why}")

    def _say(self, text: str) -> None:
        if not self._options.quiet:
            print(text, file=sys.stderr, flush=True)


def short(value: Any) -> str:
    """Return a value of an option in a few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
