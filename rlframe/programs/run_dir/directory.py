"""The directory of a run: its name, its config, its result."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import re
import shutil
import uuid
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from rlframe.errors import CheckpointError, UsageError
from rlframe.interprocess.files import write_atomically
from rlframe.learners.checkpoints import Checkpointer
from rlframe.metrics import CSVLogger, JSONLLogger, LenientLogger, Logger, TensorBoardLogger
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.config_file import load_experiment, save_experiment
from rlframe.programs.options.fields import convert
from rlframe.programs.presets import plain_name
from rlframe.programs.run_dir import lock
from rlframe.user_code.files import forget_changed

CHECKPOINTS_KEPT = 3
RUN, SEEDS, SWEEP = "config.json", "seeds.json", "sweep.json"  # the file that says what a directory holds

_NAMED = 5  # of the runs of a set, in an error
_VERSIONED = ("rlframe", "jax", "jaxlib", "dm-haiku", "optax", "numpy", "envpool", "gymnasium")


class RunDir:
    """The directory of one run, and its files. Nothing is created before `create`."""

    def __init__(self, path: str | os.PathLike) -> None:
        path = convert(str, path, "run_dir")
        self.path = pathlib.Path(os.path.abspath(path))  # once: an environment may change the directory
        self.config = self.path / RUN
        self.checkpoints = self.path / "checkpoints"
        self.reverb = self.path / "reverb"
        self.replay_service = self.path / "replay_service"
        self.coordinator = self.path / "coordinator"  # of elastic: the journal
        self.learning_curve = self.path / "learning_curve.png"
        self.result = self.path / "result.json"
        self.metrics = self.path / "metrics.jsonl"
        self.progress = self.path / "progress.json"  # of a program of several processes: what its monitor counted
        self.status = self.path / "status.json"  # see `status.py`
        self.logs = self.path / "logs"  # what each process printed: see `rlframe.engines.logs`
        self.warmup = self.path / "warmup"  # the weights that a language model's supervised steps led to

    def key(self) -> str:
        """Name the run to services that may outlive it: the same whenever it is resumed."""
        path = self.path / "run_key"
        if not path.exists():
            write_atomically(path, uuid.uuid4().hex)
        return path.read_text()

    def open_logs(self, resume_at: int | None) -> Logger:
        """Its files of rows, from which those after the step `resume_at` are taken back.

        A row that cannot be written, since the disk is full, is warned of: it does not end a run.
        """
        return LenientLogger(
            [
                JSONLLogger(self.metrics, resume_at=resume_at),
                CSVLogger(self.path / "metrics.csv", resume_at=resume_at),
                TensorBoardLogger(self.path / "tensorboard", resume_at=resume_at),
            ]
        )

    def create(self) -> None:
        """Make the directory.

        Raises:
            UsageError: it holds something already, or it cannot be made.
        """
        try:
            self.check_is_new()
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"Cannot write to {self.path}: {error.strerror}.") from error

    def check_is_new(self) -> None:
        """Raise UsageError if the directory holds anything but a lock."""
        if self.path.exists() and (not self.path.is_dir() or {*os.listdir(self.path)} - {lock.NAME}):
            raise UsageError(
                f"{self.path} exists already. Choose another --run-dir, or go on with what is in it by --resume."
            )

    def remove(self) -> None:
        """Remove the directory that `create` made: the run did not begin."""
        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def kind(self) -> str | None:
        """Kind of the directory: RUN, SEEDS or SWEEP; None if it is none of these."""
        return next((name for name in (SWEEP, SEEDS, RUN) if (self.path / name).is_file()), None)

    def runs(self) -> list[pathlib.Path]:
        """The directories of the runs that have begun, of several seeds or a sweep: in order of trial and seed."""
        pattern = {SEEDS: "seed-*", SWEEP: "trial-*/seed-*"}.get(self.kind or "")
        found = [path for path in self.path.glob(pattern or "") if (path / RUN).is_file()] if pattern else []
        return sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", str(path.relative_to(self.path)))])

    def check_kind(self, wanted: str = RUN) -> None:
        """Raise UsageError, with the command to use, if the kind of the directory is not `wanted`."""
        found = self.kind
        if found is None:
            what = {RUN: "run", SEEDS: "set of seeds", SWEEP: "sweep"}[wanted]
            raise UsageError(f"There is no {what} in {self.path}: it has no {wanted}.")
        if found == wanted:
            return
        if found == RUN:
            raise UsageError(f"{self.path} holds a single run. Go on with it: {self.resume_command}")
        runs = self.runs()
        named = ", ".join(map(str, runs[:_NAMED])) + f" and {len(runs) - _NAMED} more" * (len(runs) > _NAMED)
        raise UsageError(
            f"{self.path} holds the runs of {'several seeds' if found == SEEDS else 'a sweep'}: {named or 'none yet'}. "
            f"Name one of them, or go on with all: {self.resume_command}"
        )

    @property
    def resume_command(self) -> str:
        """The command that resumes the run, the seeds or the sweep."""
        what = "sweep" if self.kind == SWEEP else "train"
        if self.kind == SEEDS:
            what += f" --seeds {json.loads((self.path / SEEDS).read_text())['seeds']}"
        return f"rlframe {what} --resume --run-dir {self.path}"

    def describe_checkpoint(self) -> str:
        """Return a sentence about the newest checkpoint and the command that resumes from it."""
        steps = Checkpointer(self.checkpoints).steps()
        if not steps:
            return "Nothing was saved."
        newest = self.checkpoints / str(steps[-1])
        return f"What was saved last is {newest}. Go on from there: {self.resume_command}"

    def describe_failed_evaluation(self, problem: str) -> str:
        """Return sentences about a failed final evaluation: its cause, the checkpoint, and how to evaluate that."""
        steps = Checkpointer(self.checkpoints).steps()
        saved = f"The trained policy is saved in {self.checkpoints / str(steps[-1])}. " if steps else ""
        return (
            f"The evaluation after training failed: {problem} {saved}To evaluate it, correct the cause and run: "
            f"rlframe evaluate {self.path}"
        )

    def write_config(self, experiment: Experiment, notes: dict[str, Any]) -> None:
        """Write `config.json` atomically."""
        try:
            save_experiment(experiment, self.config, {**notes, "versions": versions()})
        except OSError as error:
            raise CheckpointError(f"Cannot write {self.config}: {error.strerror}.") from error

    def notes(self) -> dict[str, Any]:
        """Return the notes that `write_config` wrote."""
        return json.loads(self.config.read_text()).get("notes", {})

    def write_result(self, result: Result) -> None:
        """Write `result.json`, the object that `--json` prints, atomically: the writer may be killed."""
        try:
            write_atomically(self.result, json.dumps(result.to_json()), "\n")
        except OSError as error:
            raise CheckpointError(f"Cannot write {self.result}: {error.strerror}.") from error


def open_run(run_dir: str | os.PathLike[str], given: Mapping[str, Any]) -> tuple[RunDir, Experiment]:
    """Open the directory of a run that plays games. Return it, and the experiment with `given` names replaced.

    Raises:
        UsageError: there is no such run.
    """
    directory = RunDir(run_dir)
    directory.check_kind()
    forget_changed()
    experiment = load_experiment(directory.config, given, replace=True)
    if experiment.topology_config.learns_from != "steps":
        raise UsageError(
            f"The run in {run_dir} is of a language model. Serve it (rlframe serve policy --run-dir {run_dir}), and "
            "have its environment ask it: python ENV_FILE.py evaluate --openai.base_url http://localhost:8001/v1"
        )
    return directory, experiment


def default_path(experiment: Experiment) -> pathlib.Path:
    """Return `runs/AGENT-ENV-SEED-TIME`, with a number behind it if that exists."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{plain_name(experiment.agent)}-{plain_name(experiment.env)}-seed{experiment.seed}-{stamp}"
    path, count = pathlib.Path("runs") / name, 2
    while path.exists():
        path = path.with_name(f"{name}-{count}")
        count += 1
    return path


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that matter for results."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended."""

    env_steps: int  # of the whole run, the resumed parts included
    learner_steps: int
    return_mean: float | None  # of the final evaluation; None where there was none, or it failed
    return_std: float | None
    episodes: int  # of the final evaluation
    steps_per_second: float  # environment steps of this session over its training time
    wall_seconds: float  # of this session, evaluation included
    params_version: int
    run_dir: str
    # steps, stop_at, until_learner_steps, until_seconds, until_return, callback, interrupt (Ctrl-C, another signal, or
    # `rlframe stop`); error: a callback raised
    stopped_by: str = "interrupt"
    signal: int | None = None  # the number of the signal that stopped it
    evaluation: dict[str, float] | None = None  # all numbers of the final evaluation; None if return_mean is None
    evaluation_error: str | None = None  # the reason why the final evaluation failed, and what is saved

    @classmethod
    def read(cls, path: pathlib.Path) -> Result:
        """Read what `RunDir.write_result` wrote. The run may have been moved since."""
        return cls(**{**json.loads(path.read_text()), "run_dir": str(path.parent)})

    def to_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        values = dataclasses.asdict(self)
        for name in ("signal", "evaluation", "evaluation_error"):
            if values[name] is None:
                del values[name]
        return values
