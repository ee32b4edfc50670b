"""What stops a Learner: a loss, parameters or logs that are not what they must be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlframe.errors import NonFiniteLossError, UsageError
from rlframe.types import Logs, Tree


def check_are_numbers(logs: Logs) -> None:
    """Raises where an error ends the run: who reads them later may be in the middle of another process's call."""
    for name, value in logs.items():
        array = value if hasattr(value, "dtype") else np.asarray(value)  # nothing is fetched from the device
        if array.size != 1 or array.dtype.kind not in "fiubV":  # V: bfloat16 and the like
            raise UsageError(
                f"The agent's learner_step logs {name!r} as {array.dtype} of shape {array.shape}; a log is one number. "
                "Log its mean, or leave it out."
            )


def check_update(logs: Logs, is_finite: Any, step: int, keys: np.ndarray, last_good: Callable[[], str]) -> None:
    """Raise NonFiniteLossError if the loss of an update, or a parameter after it, is not finite.

    Args:
        logs: of the update.
        is_finite: [] bool: whether the parameters are.
        step: number of the learner step.
        keys: [B, 3], of the batch's items.
        last_good: names the last checkpoint.
    """
    loss = logs.get("loss")
    if loss is not None and not math.isfinite(loss):
        wrong = f"The loss of learner step {step} is {float(loss)}"
    elif not is_finite:
        wrong = f"A parameter is NaN or infinite after learner step {step}"
    else:
        return
    raise NonFiniteLossError(
        f"{wrong}, on a batch of {len(keys)} items whose first is (rank, incarnation, number) "
        f"{tuple(int(part) for part in keys[0])}. {last_good()} "
        "Look for NaN and very large numbers in its rewards (scores, advantages) and observations, or lower the "
        "learning rate."
    )


def check_params(params: Tree, step: int, last_good: Callable[[], str]) -> None:
    """Raises NonFiniteLossError for the first array of `params` that is not finite after learner step `step`."""
    for path, leaf in jax.tree.leaves_with_path(params):
        if not np.all(np.isfinite(leaf)):
            name = jax.tree_util.keystr(path)
            raise NonFiniteLossError(f"Parameter {name} is not finite after learner step {step}. {last_good()}")


def not_a_batch(*given: Any) -> UsageError:
    """The error for arguments of `Learner.step` that are no batch."""
    names = ", ".join(type(each).__name__ for each in given)
    return UsageError(
        f"Learner.step expects one argument, a Batch as replay_buffer.sample() returns it, or None; got ({names}). The "
        "Learner holds its parameters and state itself: learner.step(batch). The pure function of them is "
        "agent.learner_step(params, learner_state, batch)."
    )
