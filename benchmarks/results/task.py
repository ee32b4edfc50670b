"""The description of a task: settings, a goal, and published results."""

from __future__ import annotations

import dataclasses
from typing import Literal

ZOO = ("rl-baselines3-zoo", "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md")


@dataclasses.dataclass(frozen=True)
class Published:
    """A published figure for the same task."""

    what: str
    steps: int | None  # None if the source does not state them
    mean: float
    std: float | None
    source: tuple[str, str]  # name and URL
    note: str  # how mean and deviation were computed


@dataclasses.dataclass(frozen=True)
class Task:
    """An agent with its preset on an environment.

    `measure` defines the quantity that is compared with `goal`. `mean`: the mean of a seed's last 5 evaluations,
    averaged over seeds. `each`: the same for each seed. `final`: the final policy of each seed.
    """

    name: str
    agent: str
    env: str
    goal: float  # mean return over 20 episodes
    steps: int  # environment steps
    published: tuple[Published, ...]
    eval_every: int  # environment steps
    tuned: str  # a sentence about the seeds on which the preset was chosen
    measure: Literal["mean", "each", "final"] = "mean"
    options: tuple[str, ...] = ()  # additional options of `rlframe train`
    variant: str = ""  # suffix of the title for these options
    seeds: tuple[int, ...] = (1, 2, 3)
    seconds: float | None = None  # wall time after which a run is interrupted; None runs to the last step
    long: bool = False  # True if only `make results-long` trains it
    about: str = ""  # additional information for readers

    @property
    def title(self) -> str:
        """The title, for example `PPO on CartPole-v1`."""
        return f"{self.agent.upper()} on {self.env}{self.variant}"

    @property
    def arguments(self) -> list[str]:
        """The arguments that determine the results of a run and its evaluations, without the seed."""
        numbers = ["--steps", str(self.steps), "--eval-every", str(self.eval_every)]
        return ["--agent", self.agent, "--env", self.env, *numbers, *self.options]

    def command(self, seed: int) -> str:
        """Return the command line that trains a seed."""
        return " ".join(["rlframe train", *self.arguments, "--seed", str(seed)])


def zoo(agent: str, steps: int, mean: float, std: float, of: str = "") -> Published:
    """Return a figure of rl-baselines3-zoo. `of` is a prefix of the note, such as another version of the task."""
    note = f"{of}evaluation of the final policy of one run; deviation over episodes"
    return Published(f"Stable-Baselines3's {agent}", steps, mean, std, ZOO, note)
