"""The options of a Learner."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from rlframe.errors import UsageError, check_above, check_at_least


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """How `Learner.run()` has batches drawn ahead: the arguments of `make_dataset`. None: the replay's own default."""

    prefetch: int | None = None  # batches that are ready before they are asked for
    threads: int | None = None  # that draw, of a replay which can use several: Reverb's
    timeout: float | None = None  # seconds without a batch after which `run()` fails

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prefetch", "threads")
        check_above(self, 0, "timeout")

    def options_of(self, make_dataset: Callable[..., Any]) -> dict[str, Any]:
        """Return the options that are set. Raise UsageError for one that `make_dataset` does not take."""
        options = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        accepted = inspect.signature(make_dataset).parameters if options else {}
        for name in options:
            if name not in accepted:
                kind = type(getattr(make_dataset, "__self__", make_dataset)).__name__
                raise UsageError(
                    f"LearnerConfig.data.{name} is {options[name]}, but make_dataset() of the replay buffer, a {kind}, "
                    f"takes {', '.join(accepted) or 'no options'}. Leave it out."
                )
        return options


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """How a Learner starts, stops and saves."""

    seed: int = 0
    max_learner_steps: int | None = None  # `run()` ends there, and the program with it; None: at `stop()`
    ends_program: bool = True  # False: at max_learner_steps it is as after `finish()`
    checkpoint_dir: str | None = None  # None: nothing is saved
    checkpoint_every: int = 10_000  # learner steps between two checkpoints of `run()`
    checkpoint_seconds: float = 30.0  # the same in seconds; the shorter one counts: a killed learner loses so much
    checkpoints_kept: int = 3
    resume: bool = False  # begin with the latest checkpoint, if there is one
    log_every: int = 100  # learner steps between two rows of `run()`'s logger
    data: DataConfig = DataConfig()  # how `run()` reads its replay
    codec: Any = None  # of the environments; checkpoints hold it, so that `rlframe.load` needs no environment

    def __post_init__(self) -> None:
        check_at_least(self, 1, "checkpoint_every", "checkpoints_kept", "log_every")
        check_above(self, 0, "checkpoint_seconds")
        if self.resume and not self.checkpoint_dir:
            raise UsageError("LearnerConfig.resume needs a checkpoint_dir.")
