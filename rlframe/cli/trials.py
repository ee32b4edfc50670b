"""The options and trials of `rlframe sweep`: Optuna chooses the values of a trial, which is one run for each seed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union

import numpy as np
import tyro

from rlframe import extras
from rlframe.cli.several_runs import SeedRun, parse_seeds
from rlframe.cli.train_options import TrainOptions
from rlframe.errors import RlframeError, UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.metrics.curves import interquartile_mean, run_name
from rlframe.metrics.plots import OptionPanel, plot_options
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.config_file import save_experiment
from rlframe.programs.options.make_experiment import option_value
from rlframe.programs.run_dir.directory import SEEDS

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
class Varied:
    """An option and its values, as texts that the command line takes."""

    name: str  # as `learning-rate`, without dashes before it
    values: tuple[str, ...]  # of a range its lowest and highest
    is_range: bool = False
    log: bool = False  # drawn by its logarithm
    whole: bool = False  # of whole numbers, see `typed`

    def typed(self, experiment: Experiment) -> Varied:
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


def parse_varied(text: str) -> Varied:
    """`learning-rate=1e-4..1e-2:log`, `num-epochs=1..8` or `gae-lambda=0.9,0.95`. Raises UsageError for others."""
    name, equals, values = text.partition("=")
    name = name.strip().lstrip("-").replace("_", "-")
    found, listed = _RANGE.fullmatch(values.strip()), [value.strip() for value in values.split(",")]
    if not name or not equals or not all(listed) or (found is None and any(map(_ALMOST.fullmatch, listed))):
        raise UsageError(f"--vary is NAME=LOW..HIGH, NAME=LOW..HIGH:log or NAME=A,B,C, got {text!r}.")
    if found is None:
        return Varied(name, tuple(listed))
    low, high, log = found.groups()
    if not float(low) < float(high) or (log and float(low) <= 0):
        least = ", above 0 for a logarithm," if log else ""
        raise UsageError(f"--vary {text}: a range goes from a number{least} to a higher one.")
    return Varied(name, (low, high), is_range=True, log=log is not None)


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
    """The trials of an Optuna study, which `study.journal` keeps. Each is one run for each seed.

    With `--vary learning-rate=1e-4..1e-2:log --trials 2 --seeds 1-2`, `several_runs.py: run_all` calls:

        next_run()              # begins trial 0: Optuna chooses the learning rate; the run of seed 1
        next_run()              # the run of seed 2
        ended(first), ended(second)     # both have ended: Optuna gets the mean of their returns, trial 0 is over
        next_run()              # begins trial 1
        ...
        next_run()              # None: no trial is left

    Then `report()` draws the plot and prints the best trial.

    Args:
        varied: the options that differ between trials.
        experiment_of: returns the experiment of a trial for its options. Raises UsageError if they do not fit.
        experiment: shared by all trials. Its seed is that of the sampler.
        options: the options of the sweep, completed.
        directory: of the sweep.
    """

    def __init__(
        self,
        varied: list[Varied],
        experiment_of: Callable[[dict[str, str]], Experiment],
        experiment: Experiment,
        options: SweepOptions,
        directory: pathlib.Path,
    ) -> None:
        self._varied, self._experiment_of, self._experiment = varied, experiment_of, experiment
        # The runs of a killed sweep are still running: a resumed one ends them and continues them.
        self._options = dataclasses.replace(options, take_over=options.resume)
        self._directory, self._seeds = directory, parse_seeds(options.seeds or "")
        with extras.needed("rlframe sweep", "sweep"):
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
        self._unfinished = self._trials("RUNNING")
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
        count = len(self._study.trials)
        self._study.sampler = self._sampler(count)
        if self._unfinished:
            optuna_trial = self._optuna.trial.Trial(self._study, self._unfinished.pop(0)._trial_id)
        elif self._trials("WAITING") or count < (self._options.trials or 0):
            optuna_trial = self._study.ask()
        else:
            return False
        options = {each.name: each.suggest(optuna_trial) for each in self._varied}
        path = self._directory / f"trial-{optuna_trial.number}"
        runs = [SeedRun(path, seed, self._options) for seed in self._seeds]
        trial = _Trial(optuna_trial, runs, [run for run in runs if run.result is None])
        self._under_way.append(trial)
        values = [f"{name} {_short(value)}" for name, value in optuna_trial.params.items()]
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
        trial.optuna_trial.set_user_attr("returns", returns)
        self._study.tell(trial.optuna_trial, value)
        self._under_way.remove(trial)
        best = self._study.best_trial
        self._say(f"{trial.name}: return {value:.1f}; the best is {best.value:.1f}, of trial {best.number}")

    def _fail(self, trial: _Trial, why: str) -> None:
        self._under_way.remove(trial)
        for run in trial.runs:
            run.stop()
        trial.optuna_trial.set_user_attr("failed", why)
        self._study.tell(trial.optuna_trial, state=self._optuna.trial.TrialState.FAIL)
        if not self._trials("COMPLETE"):
            raise RlframeError(f"No trial has ended well, and {trial.name} failed: {why}")
        self._say(f"{trial.name} failed: {why}")

    def _sampler(self, number: int) -> Any:
        # One for each trial, so that a resumed sweep draws as one that was not interrupted, and not the same again.
        seed = int(np.random.SeedSequence([self._experiment.seed, number]).generate_state(1)[0])
        samplers = self._optuna.samplers
        return (samplers.RandomSampler if self._options.sampler == "random" else samplers.TPESampler)(seed=seed)

    def _trials(self, state: str) -> list[Any]:
        return [trial for trial in self._study.trials if trial.state.name == state]

    def _say(self, text: str) -> None:
        if not self._options.quiet:
            print(text, file=sys.stderr, flush=True)

    # --- the report

    def report(self) -> None:
        """Draw sweep.png. Print the trials by their value, and the command that repeats the best."""
        done = sorted(self._trials("COMPLETE"), key=lambda trial: trial.value, reverse=True)
        if not done:
            return
        failed = self._trials("FAIL")
        title = f"{run_name(self._experiment.agent, self._experiment.env)}: {len(done)} trials, the best in orange"
        plot_options(
            [each.panel([trial.params[each.name] for trial in (*done, *failed)]) for each in self._varied],
            [*(trial.value for trial in done), *[None] * len(failed)],
            self._directory / "sweep.png",
            title + f", and {len(failed)} that failed (x)" * bool(failed),
        )
        rows = [self._row(trial) for trial in (*done, *failed)]
        fresh = max(self._seeds) + 1
        command = f"rlframe train --config {rows[0]['run_dir']}/config.json --seeds {fresh}-{fresh + 4}"
        if not self._options.quiet:
            self._print(rows)
            said = f"The best of {len(done)} trials on the seeds that chose it; see {self._directory / 'sweep.png'}."
            print(f"{said} Try it on others: {command}", file=sys.stderr)
        if self._options.json:
            best = {**rows[0], "command": command}
            print(json.dumps({"best": best, "trials": rows, "run_dir": str(self._directory)}), flush=True)

    def _row(self, trial: Any) -> dict[str, Any]:
        failed = trial.user_attrs.get("failed")
        return {
            "trial": trial.number,
            "options": trial.params,
            "value": trial.value,
            "returns": trial.user_attrs.get("returns", []),
            **({} if failed is None else {"failed": failed}),
            "run_dir": str(self._directory / f"trial-{trial.number}"),
        }

    def _print(self, rows: list[dict[str, Any]]) -> None:
        from rlframe.metrics.terminal import console, table

        names, lines = [each.name for each in self._varied], []
        for row in rows:
            value = ["failed", ""]
            if row["returns"]:
                several = len(row["returns"]) > 1
                value = [f"{row['value']:.1f}", f"{np.std(row['returns']):.1f}" if several else ""]
            lines.append((str(row["trial"]), *value, *(_short(row["options"].get(name)) for name in names)))
        console(sys.stderr).print(table(("trial", "return", "± over seeds", *names), lines, right=True))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
