"""The JAX environments that a name selects: `jax:CartPole-v1` of rlframe, and adapters of other suites."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

from rlframe.errors import UsageError

# The ids of rlframe's own environments, and the function that imports the class of each.
_OWN = {
    "Acrobot-v1": "classic:Acrobot",
    "Breakout-MinAtar": "breakout:Breakout",
    "CartPole-v1": "classic:CartPole",
    "Pendulum-v1": "classic:Pendulum",
    "PositionOnlyCartPole-v1": "classic:PositionOnlyCartPole",
}
