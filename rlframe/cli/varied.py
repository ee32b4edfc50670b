"""What `rlframe sweep --vary NAME=VALUES` says: one option of `rlframe train`, and the values that it may have."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from rlframe.errors import UsageError
from rlframe.metrics.plots import OptionPanel
from rlframe.programs.experiment import Experiment, flat

_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")
_ALMOST = re.compile(rf"(?:{_NUMBER})?\.\.(?:{_NUMBER})?(?::\w*)?|{_NUMBER}:\w*")  # a range that went wrong


@dataclasses.dataclass(frozen=True)
class Varied:
    """An option and its values, as texts that the command line takes."""

    name: str  # as `learning-rate`, without dashes before it
    values: tuple[str, ...]  # of a range its lowest and highest
    is_range: bool = False
    log: bool = False  # drawn by its logarithm
    whole: bool = False  # of whole numbers, see `typed`

    def typed(self, experiment: Experiment) -> Varied:
        """The same, a range of whole numbers where the option is one in `experiment`; None there says nothing.

        Raises:
            UsageError: it has a range, and is no number; or it is a switch, and has other values than True and False.
        """
        value = _value_of(experiment, self.name)
        if isinstance(value, bool) and not {text.lower() for text in self.values} <= {"true", "false"}:
            raise UsageError(f"--vary {self.name} is a switch: its values are True,False.")
        if not self.is_range or value is None:
            return self
        if not isinstance(value, (int, float)):
            raise UsageError(f"--vary {self.name} has a range, and is no number: list its values, A,B,C.")
        return dataclasses.replace(self, whole=isinstance(value, int))

    def suggest(self, trial: Any) -> str:
        """The value that an Optuna trial has, or gets now."""
        if not self.is_range:
            return trial.suggest_categorical(self.name, self.values)
        suggest, number = (trial.suggest_int, int) if self.whole else (trial.suggest_float, float)
        low, high = map(number, self.values)
        return str(suggest(self.name, low, high, log=self.log))

    def panel(self, values: list[Any]) -> OptionPanel:
        """What is drawn of it: its values in all trials."""
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


def _value_of(experiment: Experiment, option: str) -> Any:
    """The value of an option, as `learning-rate` or `network.hidden`; None where there is none such."""
    first, *rest = option.replace("-", "_").split(".")
    options = flat(experiment)
    if rest and first == "network":
        value = options.get("network_config")
    else:
        value = options.get(first, getattr(options["agent_config"], first, None))
    for name in rest:
        value = getattr(value, name, None)
    return value
