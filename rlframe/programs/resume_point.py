"""The checkpoint that a resumed run goes on from: it is good, and nothing newer is in its way."""

from __future__ import annotations

import logging
import pathlib
import time
from collections.abc import Iterable

from rlframe.errors import CheckpointError, UsageError
from rlframe.learners.checkpoints import Checkpointer

_log = logging.getLogger(__name__)


def settle(checkpoints: pathlib.Path, replays: Iterable[pathlib.Path], aside: pathlib.Path, step: int | None) -> None:
    """Makes the newest checkpoint the one to go on from. Versions lie beside the checkpoints and stay.

    Args:
        checkpoints: their directory; where it holds none there is nothing to do.
        replays: directories of the replays that they name, by number.
        aside: below which all that is newer than `step` is moved; nothing is removed.
        step: of the checkpoint to go on from; None: the newest one.

    Raises:
        UsageError: that one is damaged, or there is none of this step.
    """
    checkpointer = Checkpointer(checkpoints)
    steps = checkpointer.steps()
    if not steps and step is None:
        return
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise UsageError(f"There is no checkpoint {step} in {checkpoints} to go on from; there are {there}.")
    chosen = steps[-1] if step is None else step
    try:
        extras = checkpointer.extras(chosen)
    except CheckpointError as error:
        raise UsageError(f"{error} {_newest_good(checkpointer, chosen)}") from error
    finally:
        checkpointer.close()
    newer = [checkpoints / str(one) for one in reversed(steps) if one > chosen]
    if newer:
        saved = (extras["extras"] or {}).get("replay") or 0
        # Checkpoints first, the newest before the others: whatever is cut off, what is left has its replay.
        newer += [
            path for replay in replays for path in replay.glob("*") if path.name.isdigit() and int(path.name) > saved
        ]
        _set_aside(newer, checkpoints.parent, aside / time.strftime("%Y%m%d-%H%M%S"))


def _newest_good(checkpointer: Checkpointer, damaged: int) -> str:
    for step in reversed(checkpointer.steps()):
        try:
            if step != damaged:
                checkpointer.extras(step)
                return f"The newest good one is {step}: --resume --resume-from {step} goes on there."
        except CheckpointError:
            continue
    return "No other one is good: start a new run, with --config RUN_DIR/config.json."


def _set_aside(paths: list[pathlib.Path], of: pathlib.Path, aside: pathlib.Path) -> None:
    for path in paths:
        target = aside / path.relative_to(of)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
        except OSError as error:
            raise UsageError(f"Cannot move {path} to {target}: {error.strerror}.") from error
    _log.warning("What is newer than the checkpoint to go on from was moved to %s.", aside)
