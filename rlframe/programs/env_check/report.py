"""The report of `check_env`: problems, measurements and the recommended command."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from rlframe.errors import RlframeError


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem of an environment.

    Attributes:
        level: "error" if runs fail or cannot be repeated, otherwise "warning".
        check: the part that was checked: "observation", "seed", "memory" and others.
        wrong: the problem. If the other texts are empty, it contains all of them.
        expected, received, fix: the expected values, the received values, and how to correct the environment.
    """

    level: str
    check: str
    wrong: str
    expected: str = ""
    received: str = ""
    fix: str = ""

    @classmethod
    def of_error(cls, check: str, error: RlframeError) -> Problem:
        """Return the problem that an error of a pool describes, with the place in the user's code if it is known."""
        places = re.findall(r'File "(.+?)", line (\d+)', getattr(error, "traceback_text", ""))
        place = f"line {places[-1][1]} of {places[-1][0]}" if places else ""
        return cls("error", check, str(error), fix=f"See {place}." if place else "")

    def __str__(self) -> str:
        details = {"expected": self.expected, "received": self.received, "fix": self.fix}
        lines = [f"{self.level}: {self.check}: {self.wrong}"]
        return "\n".join([*lines, *(f"  {name + ':':9} {text}" for name, text in details.items() if text)])


class Findings:
    """Collects problems. A second problem of the same kind is dropped."""

    def __init__(self) -> None:
        self._problems: dict[tuple[str, str], Problem] = {}

    def add(self, problem: Problem) -> None:
        """Add a problem, unless there is one with the same check and the same text."""
        self._problems.setdefault((problem.check, problem.wrong), problem)

    def error(self, check: str, wrong: str, *, expected: str, received: str, fix: str) -> None:
        """Add an error."""
        self.add(Problem("error", check, wrong, expected, received, fix))

    def warn(self, check: str, wrong: str, *, expected: str, received: str, fix: str) -> None:
        """Add a warning."""
        self.add(Problem("warning", check, wrong, expected, received, fix))

    @property
    def has_errors(self) -> bool:
        """True if there is a problem with the level "error"."""
        return any(problem.level == "error" for problem in self._problems.values())

    def sorted(self) -> tuple[Problem, ...]:
        """Return the problems, errors first."""
        return tuple(sorted(self._problems.values(), key=lambda problem: problem.level))


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """The recommended pool and training command.

    Attributes:
        env_type: type of the pool, as for `--env-type`.
        num_workers: number of workers of the pool. None if this type has no workers.
        agent: name of the agent.
        command: the complete command, for a shell. For an environment that no file defines: Python code.
    """

    env_type: str
    num_workers: int | None
    agent: str
    command: str


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The result of `check_env`. `print(report)` shows it.

    Attributes:
        env: name of the environment.
        problems: the problems, errors first.
        measurements: name -> value: specs, numbers of steps and episodes, returns, times in seconds, growth of memory
            in bytes per step, and `steps_per_second` of each measured pool.
        recommendation: the recommended pool and command. None after an error.
    """

    env: str
    problems: tuple[Problem, ...]
    measurements: dict[str, Any]
    recommendation: Recommendation | None

    @property
    def ok(self) -> bool:
        """True if there are no errors. There may be warnings."""
        return all(problem.level != "error" for problem in self.problems)

    def to_json(self) -> dict[str, Any]:
        """Return the report as an object for JSON."""
        return {"ok": self.ok, **dataclasses.asdict(self)}

    def __str__(self) -> str:
        lines = [self.env, *(f"  {name:12} {text}" for name, text in _describe(self.measurements)), ""]
        lines += map(str, self.problems)
        lines += ["" if self.problems else "No problems."]
        if self.recommendation is not None:
            pool = self.recommendation
            workers = "" if pool.num_workers is None else f" --num-workers {pool.num_workers}"
            lines += [f"Recommended: --env-type {pool.env_type}{workers}, and for example", f"  {pool.command}"]
        return "\n".join(lines).strip()


def _describe(measured: dict[str, Any]) -> list[tuple[str, str]]:
    """Return (title, text) for each line of measurements."""
    lines: list[tuple[str, str]] = [(name, measured[name]) for name in ("observation", "action") if name in measured]
    if "steps" in measured:
        ends = f"{measured['terminated']} terminated, {measured['truncated']} truncated"
        if not measured["episodes"]:
            ends = "none has ended: check for more seconds if they are long"
        lines.append(
            ("episodes", f"{measured['episodes']:,} in {measured['steps']:,} steps with random actions; {ends}")
        )
    for name in ("length", "return"):
        if measured.get(name) is not None:
            low, mean, high = measured[name]
            lines.append((name, f"{low:,.5g} to {high:,.5g}, on average {mean:,.4g}"))
    calls = {name: measured.get(f"seconds_per_{name}") for name in ("step", "reset")}
    if times := [f"{_seconds(seconds)} per {name}" for name, seconds in calls.items() if seconds is not None]:
        lines.append(("time", ", ".join(times)))
    if "bytes_per_step" in measured:
        growth = measured["bytes_per_step"]
        lines.append(("memory", f"grows by {growth:,} bytes per step" if growth else "does not grow"))
    if measured.get("steps_per_second"):
        speeds = ", ".join(f"{pool} {speed:,.0f}" for pool, speed in measured["steps_per_second"].items())
        lines.append(("steps/s", speeds))
    return lines


def _seconds(seconds: float) -> str:
    return (
        f"{seconds * 1e6:.0f} us"
        if seconds < 1e-3
        else f"{seconds * 1e3:.1f} ms"
        if seconds < 1
        else f"{seconds:.1f} s"
    )
