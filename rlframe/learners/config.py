"""The options of a Learner."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from rlframe.errors import UsageError, check_above, check_at_least


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Arguments of the replay buffer's `make_dataset`, which `Learner.run()` calls. None means the buffer's default."""

    prefetch: int | None = None  # number of batches to fetch ahead
    threads: int | None = None  # number of threads that sample; only Reverb's replay has this option
    timeout: float | None = None  # `run()` raises an error after this number of seconds without a batch

    def __post_init__(self) -> None:
        check_at_least(self, 1, "prefetch", "threads")
        check_above(self, 0, "timeout")

    def options_of(self, make_dataset: Callable[..., Any]) -> dict[str, Any]:
        """Return the options that are not None. Raise UsageError if `make_dataset` does not accept one of them."""
        options = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        accepted = inspect.signature(make_dataset).parameters if options else {}
        for name in options:
            if name not in accepted:
                kind = type(getattr(make_dataset, "__self__", make_dataset)).__name__
                raise UsageError(
                    f"LearnerConfig.data.{name} is {options[name]}, but make_dataset() of the replay buffer, a {kind}, "
                    f"takes {', '.join(accepted) or 'no options'}. Remove the option."
                )
        return options


@dataclasses.dataclass(frozen=True)
class LearnerConfig:
    """When a Learner starts, stops and saves."""

    seed: int = 0
    max_learner_steps: int | None = None  # `run()` and the program end at this learner step; None: no limit
    ends_program: bool = True  # False: after max_learner_steps, the program continues, and only learning ends
    checkpoint_dir: str | None = None  # directory of the checkpoints; None saves nothing
    checkpoint_every: int = 10_000  # learner steps between two checkpoints of `run()`
    checkpoint_seconds: float = 30.0  # seconds between two checkpoints; a killed learner loses at most this much time
    checkpoints_kept: int = 3
    resume: bool = False  # start from the latest checkpoint, if there is one
    log_every: int = 100  # learner steps between two rows that `run()` writes to the logger
    data: DataConfig = DataConfig()  # how `run()` reads the replay buffer
    # Number of environments of all actors. If it is given, the constructor compiles the update in another thread, so
    # that the first update need not wait. None: the first update compiles.
    num_envs: int | None = None
    # Devices that share each update: a number (the first ones of the process), or the ids of devices.
    devices: int | tuple[int, ...] = 1
    shard_params: bool = False  # with several devices: each device has only a part of large parameters
    codec: Any = None  # environment codec, saved in checkpoints so that `rlframe.load` needs no environment

    def __post_init__(self) -> None:
        check_at_least(self, 1, "checkpoint_every", "checkpoints_kept", "log_every", "num_envs")
        check_above(self, 0, "checkpoint_seconds")
        if self.resume and not self.checkpoint_dir:
            raise UsageError("LearnerConfig.resume needs a checkpoint_dir.")
