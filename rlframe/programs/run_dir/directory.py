"""The directory of a run: its name, its files, its config, its step counts and its result."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import math
import os
import pathlib
import platform
import re
import shutil
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from rlframe.engines.devices import describe_devices
from rlframe.errors import CheckpointError, UsageError
from rlframe.interprocess.files import stored_id, write_atomically
from rlframe.metrics import CSVLogger, JSONLLogger, LenientLogger, Logger, TensorBoardLogger, read_jsonl
from rlframe.metrics.rows import COUNTERS, ActorCounts
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.fields import convert
from rlframe.programs.options.saved_experiment import load_experiment, save_experiment
from rlframe.programs.presets import plain_name
from rlframe.programs.run_dir import lock
from rlframe.user_code.files import forget_changed

_log = logging.getLogger(__name__)

CHECKPOINTS_KEPT = 3
# Kinds of directories. Each kind is the name of a file that only directories of this kind contain.
RUN, SEEDS, SWEEP = "config.json", "seeds.json", "sweep.json"

_NAMED = 5  # maximum number of runs to list in an error message
_VERSIONED = ("rlframe", "jax", "jaxlib", "dm-haiku", "optax", "numpy", "envpool", "gymnasium", "gymnax", "jumanji")


class RunDir:
    """The directory of a run and the paths of its files. Only `create` creates the directory."""

    def __init__(self, path: str | os.PathLike) -> None:
        path = convert(str, path, "run_dir")
        self.path = pathlib.Path(os.path.abspath(path))  # user code may change the working directory
        self.config = self.path / RUN
        self.checkpoints = self.path / "checkpoints"
        self.reverb = self.path / "reverb"
        self.replay_service = self.path / "replay_service"
        self.coordinator = self.path / "coordinator"  # journal of the coordinator; only elastic runs have one
        self.learning_curve = self.path / "learning_curve.png"
        self.result = self.path / "result.json"
        self.metrics = self.path / "metrics.jsonl"
        self.progress = self.path / "progress.json"  # the monitor's counters; only if there are several processes
        self.status = self.path / "status.json"  # see `status.py`
        self.logs = self.path / "logs"  # output of each process: see `rlframe.engines.logs`
        self.warmup = self.path / "warmup"  # weights after the supervised steps of a language model

    def key(self) -> str:
        """Return the id of the run, for services that outlive a session. A resumed run has the same id."""
        return stored_id(self.path / "run_key")

    def open_logs(self, resume_at: int | None) -> Logger:
        """Open the metrics files, and remove the rows after the step `resume_at`.

        If a row cannot be written (for example, because the disk is full), the logger only logs a warning.
        """
        return LenientLogger(
            [
                JSONLLogger(self.metrics, resume_at=resume_at),
                CSVLogger(self.path / "metrics.csv", resume_at=resume_at),
                TensorBoardLogger(self.path / "tensorboard", resume_at=resume_at),
            ]
        )

    def create(self) -> None:
        """Create the directory.

        Raises:
            UsageError: the directory is not empty or cannot be created.
        """
        try:
            self.check_is_new()
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"Cannot write to {self.path}: {error.strerror}.") from error

    def check_is_new(self) -> None:
        """Raise UsageError if the directory contains any file except a lock."""
        if self.path.exists() and (not self.path.is_dir() or {*os.listdir(self.path)} - {lock.NAME}):
            raise UsageError(
                f"{self.path} exists already. Choose another --run-dir, or continue the existing run with --resume."
            )

    def remove(self) -> None:
        """Remove the directory and its files. Called if the run could not start."""
        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def kind(self) -> str | None:
        """Kind of the directory: RUN, SEEDS or SWEEP. None if it is not a directory of rlframe."""
        return next((name for name in (SWEEP, SEEDS, RUN) if (self.path / name).is_file()), None)

    def runs(self) -> list[pathlib.Path]:
        """Return the directories of all started runs of a sweep or of several seeds, sorted by trial and seed."""
        pattern = {SEEDS: "seed-*", SWEEP: "trial-*/seed-*"}.get(self.kind or "")
        found = [path for path in self.path.glob(pattern or "") if (path / RUN).is_file()] if pattern else []
        return sorted(found, key=lambda path: [int(n) for n in re.findall(r"\d+", str(path.relative_to(self.path)))])

    def check_kind(self, wanted: str = RUN) -> None:
        """Raise UsageError if the kind of the directory is not `wanted`. The message contains the command to use."""
        found = self.kind
        if found is None:
            noun = {RUN: "run", SEEDS: "set of seeds", SWEEP: "sweep"}[wanted]
            raise UsageError(f"There is no {noun} in {self.path}: it has no {wanted}.")
        if found == wanted:
            return
        if found == RUN:
            raise UsageError(f"{self.path} contains a single run. Resume it with: {self.resume_command}")
        runs = self.runs()
        named = ", ".join(map(str, runs[:_NAMED])) + f" and {len(runs) - _NAMED} more" * (len(runs) > _NAMED)
        raise UsageError(
            f"{self.path} contains the runs of {'several seeds' if found == SEEDS else 'a sweep'}: "
            f"{named or 'none yet'}. Name one of them, or resume all with: {self.resume_command}"
        )

    def go_back_to(self, checkpoint: int | None, experiment: Experiment) -> None:
        """Set the count of environment steps back to a checkpoint. Do nothing if the checkpoint itself has the count.

        The checkpoints of programs are numbered by learner steps. The rows connect these with environment steps.
        """
        if checkpoint is None or not self.progress.exists() or experiment.topology_config.learns_from != "steps":
            return
        rows = read_jsonl(self.metrics) if self.metrics.exists() else []
        steps = [row["step"] for row in rows if row.get("learner_steps", math.inf) <= checkpoint]
        ProgressFile(self.progress, "").go_back_to(max(steps, default=0))

    @property
    def resume_command(self) -> str:
        """The command that resumes the run, the seeds or the sweep."""
        command = "sweep" if self.kind == SWEEP else "train"
        if self.kind == SEEDS:
            command += f" --seeds {json.loads((self.path / SEEDS).read_text())['seeds']}"
        return f"rlframe {command} --resume --run-dir {self.path}"

    def describe_checkpoint(self) -> str:
        """Return sentences about the newest checkpoint and the command that resumes from it."""
        steps = self._checkpoint_steps()
        if not steps:
            return "Nothing was saved."
        newest = self.checkpoints / str(steps[-1])
        return f"The last checkpoint is {newest}. Resume with: {self.resume_command}"

    def describe_failed_evaluation(self, problem: str) -> str:
        """Return sentences about a failed final evaluation: its cause, the checkpoint, and how to retry."""
        steps = self._checkpoint_steps()
        saved = f"The trained policy is saved in {self.checkpoints / str(steps[-1])}. " if steps else ""
        return (
            f"The evaluation after training failed: {problem} {saved}To evaluate it, fix the problem and run: "
            f"rlframe evaluate {self.path}"
        )

    def _checkpoint_steps(self) -> list[int]:
        from rlframe.learners.checkpoints import Checkpointer  # imports JAX, which `rlframe status` does not need

        return Checkpointer(self.checkpoints).steps()

    def write_config(self, experiment: Experiment, notes: dict[str, Any]) -> None:
        """Write `config.json` atomically."""
        try:
            devices, _ = describe_devices(experiment.topology_config.engine_class.in_process)
            save_experiment(experiment, self.config, {**notes, "versions": versions(), "devices": devices})
        except OSError as error:
            raise CheckpointError(f"Cannot write {self.config}: {error.strerror}.") from error

    def notes(self) -> dict[str, Any]:
        """Return the notes in `config.json`."""
        return json.loads(self.config.read_text()).get("notes", {})

    def write_result(self, result: Result) -> None:
        """Write `result.json` atomically. `--json` prints the same object."""
        try:
            write_atomically(self.result, json.dumps(result.to_json()), "\n")
        except OSError as error:
            raise CheckpointError(f"Cannot write {self.result}: {error.strerror}.") from error


def open_run(run_dir: str | os.PathLike[str], given: Mapping[str, Any]) -> tuple[RunDir, Experiment]:
    """Return (directory, experiment) of a run of games. Objects in `given` replace the experiment's objects.

    Raises:
        UsageError: the directory contains no run, or a run of a language model.
    """
    directory = RunDir(run_dir)
    directory.check_kind()
    forget_changed()
    experiment = load_experiment(directory.config, given, replace=True)
    if experiment.topology_config.learns_from != "steps":
        raise UsageError(
            f"The run in {run_dir} trains a language model. To evaluate it, serve it with rlframe serve policy "
            f"--run-dir {run_dir}, and run: python ENV_FILE.py evaluate --openai.base_url http://localhost:8001/v1"
        )
    return directory, experiment


def default_path(experiment: Experiment) -> pathlib.Path:
    """Return the path `runs/AGENT-ENV-SEED-TIME`. If this path exists, append a number."""
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{plain_name(experiment.agent)}-{plain_name(experiment.env)}-seed{experiment.seed}-{stamp}"
    path, count = pathlib.Path("runs") / name, 2
    while path.exists():
        path = path.with_name(f"{name}-{count}")
        count += 1
    return path


def versions() -> dict[str, str]:
    """Return the versions of Python and of packages that may affect results."""
    found = {"python": platform.python_version()}
    for name in _VERSIONED:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a run."""

    env_steps: int  # environment steps of the whole run, including earlier sessions
    learner_steps: int
    # mean return of the final evaluation; None if there was no evaluation or if it failed
    return_mean: float | None
    return_std: float | None
    episodes: int  # episodes of the final evaluation
    steps_per_second: float  # environment steps of this session, divided by the seconds of training
    wall_seconds: float  # seconds that this session took, including the evaluation
    params_version: int
    run_dir: str
    # reason why the session ended: steps, stop_at, until_learner_steps, until_seconds, until_return, callback,
    # interrupt (Ctrl-C, another signal, or `rlframe stop`), or error (a callback raised)
    stopped_by: str = "interrupt"
    signal: int | None = None  # number of the signal that stopped the run
    evaluation: dict[str, float] | None = None  # all values of the final evaluation; None if return_mean is None
    evaluation_error: str | None = None  # why the final evaluation failed, and the last checkpoint

    @classmethod
    def read(cls, path: pathlib.Path) -> Result:
        """Read a `result.json`. Set `run_dir` to the directory of the file, because the run may have been moved."""
        return cls(**{**json.loads(path.read_text()), "run_dir": str(path.parent)})

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object that `--json` prints."""
        optional = ("signal", "evaluation", "evaluation_error")  # keys that are left out if the value is None
        values = dataclasses.asdict(self)
        return {name: value for name, value in values.items() if value is not None or name not in optional}


class ProgressFile:
    """The file with the step counts of a program. A restarted monitor and the next session read them and continue.

    Args:
        path: The file. It is not necessary that it exists.
        session_id: ID of the session. The key "before" has the total counts of all earlier sessions.

    Raises:
        CheckpointError: The file is damaged.

    Attributes:
        counts: Counts of the actors.
        evaluated: Step at which the newest logged evaluation started. None means no evaluation so far.
        ended: Reason why the session ends before its last step. None means no early stop.
    """

    def __init__(self, path: pathlib.Path, session_id: str) -> None:
        self._path, self._session_id = path, session_id
        self._save_failed = False  # the last save failed, for example because the disk is full
        self.counts = ActorCounts()
        self.evaluated: int | None = None
        self.ended: str | None = None
        if path.exists():
            saved_session, self.counts, self.evaluated, self.ended = self._read()
            if saved_session != session_id:
                self.ended = None
                total, logged = list(self.counts.total().values()), self.counts.total_logged()
                self.counts = ActorCounts({"before": total}, {"before": logged})

    def go_back_to(self, step: int) -> None:
        """Set the total count of environment steps to `step`, and write the file."""
        total = {**self.counts.total(), COUNTERS[0]: float(step)}
        self.counts = ActorCounts({"before": list(total.values())}, {"before": self.counts.total_logged()})
        self.evaluated = None if self.evaluated is None else min(self.evaluated, step)
        self.save()

    def save(self) -> None:
        """Write the file atomically. Raise CheckpointError if that fails."""
        content = {
            "session": self._session_id,
            "evaluated": self.evaluated,
            "ended": self.ended,
            "counts": self.counts.counters,
            "logged": self.counts.logged,
        }
        try:
            write_atomically(self._path, json.dumps(content))
        except OSError as error:
            raise CheckpointError(
                f"Cannot write {self._path}: {error.strerror}. Free some disk space, then resume the run."
            ) from error

    def try_to_save(self) -> None:
        """Write the file. If this fails, log only one warning. The monitor calls this again at the next row."""
        try:
            self.save()
        except CheckpointError as error:
            if not self._save_failed:
                _log.warning("%s", error)
            self._save_failed = True
        else:
            if self._save_failed:
                _log.warning("Writing %s works again.", self._path)
            self._save_failed = False

    def _read(self) -> tuple[str, ActorCounts, int | None, str | None]:
        try:
            saved: dict[str, Any] = json.loads(self._path.read_text())
            counters = {actor: [each + 0 for each in values] for actor, values in saved["counts"].items()}
            if any(len(values) != len(COUNTERS) for values in counters.values()):
                raise ValueError(f"not every actor has {len(COUNTERS)} counters")
            evaluated = None if saved["evaluated"] is None else int(saved["evaluated"])
            return saved["session"], ActorCounts(counters, saved.get("logged", {})), evaluated, saved.get("ended")
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{self._path} is damaged: {type(error).__name__}: {error}. It must contain the counts of the actors: "
                f'{{"session": ..., "evaluated": STEPS, "counts": {{"RANK.INCARNATION": '
                f"[{', '.join(COUNTERS)}]}}}}. Restore a copy of the file, or remove it. If you remove it, the "
                "checkpoints stay, but steps are counted from 0, and the logs start again."
            ) from error
