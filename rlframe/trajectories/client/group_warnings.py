"""Warnings about fields in groups that other trainers learn from and this one ignores."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from rlframe.trajectories.client.groups import Group, finite_temperature
from rlframe.trajectories.messages import IGNORED

_log = logging.getLogger(__name__)


class GroupWarnings:
    """Logs each kind of such a field once."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def look(self, groups: Sequence[Group]) -> None:
        """Log the kinds of fields in these groups that were not logged before."""
        for group in groups:
            for kind, found in self._found(group):
                if kind not in self._logged:
                    self._logged.add(kind)
                    _log.warning("A group of environment %s %s This is logged once.", group.env_id, found)

    def _found(self, group: Group) -> Iterator[tuple[str, str]]:
        """Return pairs of a kind and a sentence about it."""
        overrides = [override or {} for override in group.overrides or []]
        for source in (*overrides, group.generation_params or {}, group.group_overrides or {}):
            if (given := source.get("temperature")) is not None and finite_temperature(given) is None:
                yield (
                    "unused temperature",
                    f"has the temperature {str(given)[:40]}, which is not used: it is no finite float32.",
                )
        other = group.temperatures[group.temperatures != 1]
        if len(other) and group.inference_logprobs is not None:
            yield (
                "temperature",
                f"has a temperature of {other[0]:g}. Its inference_logprobs must be at this temperature, because "
                "learning compares them with log-probabilities at it. Those of `rlframe serve policy` are at "
                "temperature 1: sample at 1, or send no inference_logprobs.",
            )
        if unknown := sorted(
            {str(name) for one in overrides for name in one} - {"set_advantage_to_zero", "temperature"}
        ):
            yield f"overrides {unknown}", f"has overrides that change nothing here: {', '.join(unknown)}."
        if unknown := sorted(map(str, set(group.group_overrides or {}) - {"group_size", "temperature"})):
            yield f"group_overrides {unknown}", f"has group_overrides that change nothing here: {', '.join(unknown)}."
        for name in ("distill_token_ids", "distill_logprobs", "images"):
            if getattr(group, name):
                yield name, f"has {name}, which nothing is learned from here."
        if "masks" not in self._logged:
            for index, (mask, tokens) in enumerate(zip(group.masks, group.tokens)):
                if (wrong := (mask != IGNORED) & (mask != tokens)).any():
                    at = int(np.argmax(wrong))
                    yield (
                        "masks",
                        f"has masks that differ from both the token and {IGNORED}: {mask[at]} for the token "
                        f"{tokens[at]}, at position {at} of sequence {index}. "
                        f"Every token whose mask is not {IGNORED} is trained on.",
                    )
                    break
