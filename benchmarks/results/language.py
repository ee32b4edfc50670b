"""Language models: what GRPO makes of random weights, and what imitation alone makes of them in the same time."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import random
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.results.records import Made
from benchmarks.results.runs import Run
from rlframe.metrics.curves import RunCurve
from rlframe.metrics.files import read_jsonl


@dataclasses.dataclass(frozen=True)
class LanguageTask:
    """GRPO on an environment of `examples/llm`, with its preset."""

    name: str
    env: str
    steps: int  # updates of GRPO, after the supervised ones
    eval_every: int
    measure: str  # what the environment's first metric is
    goal: float
    seconds: float = 900.0  # that a run may take
    seeds: tuple[int, ...] = (1, 2, 3)
    imitation: bool = False  # whether imitation alone is shown beside it, for as long as each run took
    about: str = ""

    @property
    def title(self) -> str:
        """`GRPO on Reverse`."""
        return f"GRPO on {self.env.rpartition(':')[2]}"

    @property
    def arguments(self) -> list[str]:
        """Of `rlframe train`, but for the seed."""
        options = ["--topology", "light_env", "--steps", str(self.steps), "--eval-every", str(self.eval_every)]
        return ["--agent", "grpo", "--env", self.env, *options]

    def command(self, seed: int) -> str:
        """By which a user trains a seed."""
        return " ".join(["rlframe train", *self.arguments, "--seed", str(seed)])


TASKS = (
    LanguageTask(
        name="grpo-reverse",
        env="examples/llm/reverse.py:Reverse",
        steps=200,
        eval_every=50,
        measure="exact match",
        goal=0.9,
        imitation=True,
        about=(
            "1 to 6 lowercase letters. The measure is on 200 different strings that are in no demonstration and are "
            "never asked in training (one string in ten is held out, by its checksum), at temperature 0. The preset "
            "was chosen on another 100 held-out strings; 8 short ones are among these as well. *Imitation alone* goes "
            "on with the supervised steps, at their learning rate, for the wall time of the whole run. Where right "
            "answers can be shown it is the better teacher; GRPO learns from scores alone."
        ),
    ),
    LanguageTask(
        name="grpo-guess",
        env="examples/llm/guess.py:Guess",
        steps=120,
        eval_every=30,
        measure="score",
        goal=0.7,
        seeds=(4, 5, 6),
        about=(
            "A number from 1 to 15, in at most six guesses, after each of which the game says whether it is smaller or "
            "larger. The demonstrations guess at random, for a mean score of 0.68; that what the game says is of use, "
            "only GRPO finds out. Who guesses at random among what is left has 0.79, who always halves it 0.89. The "
            "measure is over a game for each number at temperature 0, at which who has only seen random guesses says "
            "the same number again and again; *reward*, the mean score of the first and of the last ten updates, is "
            "at temperature 1. The score and the preset were chosen on seeds 1 and 2, which are not shown."
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class LanguageRecord(Made):
    """A run of GRPO, and of imitation alone for as long."""

    updates: int  # of GRPO
    before: dict[str, float]  # the environment's evaluation after the supervised steps
    after: dict[str, float]  # at the end
    rewards: tuple[float, float]  # mean scores of the first and of the last 10 updates, sampled at temperature 1
    reached: float | None  # seconds of the first evaluation at or above the goal, and of all after it
    evaluations: list[list[float]]  # [seconds, measure]
    imitated: list[list[float]]  # of imitation alone: [updates, seconds, measure]

    @property
    def value(self) -> float:
        """Of the measure, at the end."""
        return next(iter(self.after.values()))

    def passed(self, task: LanguageTask) -> bool:
        """Whether it is good enough at the end, and that in time."""
        return self.value >= task.goal and self.seconds <= task.seconds


def of_language(task: LanguageTask, run: Run, how: Made) -> LanguageRecord:
    """The record of a run that has just ended; imitates for as long where that is asked for."""
    rows = read_jsonl(run.directory / "metrics.jsonl")
    evaluated = [row for row in rows if "return_mean" in row]
    rewards = [row["reward"] for row in rows if "reward" in row]
    reached = None
    for row in reversed(evaluated):
        if row["return_mean"] < task.goal:
            break
        reached = row["wall_seconds"]
    return LanguageRecord(
        **vars(how),
        updates=evaluated[-1]["step"] - evaluated[0]["step"],
        before=_metrics(evaluated[0]),
        after=_metrics(evaluated[-1]),
        rewards=(statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])),
        reached=reached,
        evaluations=[[row["wall_seconds"], row["return_mean"]] for row in evaluated],
        imitated=imitate(task, run.seed, run.seconds) if task.imitation else [],
    )


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    """`{"exact_match": 0.9}` of a row of an evaluation."""
    return {name.partition("/")[2]: value for name, value in row.items() if name.startswith("eval/")}


def imitate(task: LanguageTask, seed: int, seconds: float) -> list[list[float]]:
    """The run's supervised steps, which go on for so many seconds, compilation and evaluations included.

    Returns:
        [updates, seconds, measure] of each evaluation.
    """
    import jax

    from rlframe import compilation
    from rlframe.agents.grpo import GRPO
    from rlframe.language.warm_up import demonstration_batch
    from rlframe.programs.options.make_experiment import make_experiment
    from rlframe.programs.topologies.language_nodes import load_env_class

    began = time.monotonic()
    described = make_experiment("grpo", task.env)
    env_cls: Any = load_env_class(task.env)
    env = env_cls(*env_cls.config_init())
    asyncio.run(env.setup())
    cfg = described.agent_config
    pupil = GRPO(dataclasses.replace(cfg, loss="sft", learning_rate=cfg.supervised_learning_rate))
    params = pupil.initial_params(jax.random.PRNGKey(seed))  # just as rlframe.language.warm_up begins
    state = pupil.initial_learner_state(params)
    update = compilation.jit(pupil.learner_step, differentiates=True)
    source = random.Random(seed)
    evaluations: list[list[float]] = []
    step, due = 0, 0
    while True:
        ended = time.monotonic() - began >= seconds
        if step >= due or ended:
            due = step + (50 if step < cfg.supervised_steps else 500)
            solved = _solved(env, pupil.model_config, params)
            evaluations.append([step, round(time.monotonic() - began, 1), solved])
        if ended:
            break
        pairs = env.demonstrations(source, cfg.supervised_batch_size)
        params, state, _ = update(params, state, demonstration_batch(env.tokenizer, pairs, cfg.max_tokens))
        step += 1
    asyncio.run(env.close())
    return evaluations


def _solved(env: Any, model_config: Any, params: Any) -> float:
    """The part of the environment's exam that the model answers rightly at temperature 0."""
    from rlframe.language.decoding import SamplingParams, generate

    prompts = [env.tokenizer.encode(env.prompt(item)) for item in env.exam]
    longest = max(len(env.answer(item)) for item in env.exam) + 1
    sampling = SamplingParams(max_tokens=longest, temperature=0.0, stop_tokens=env.tokenizer.stop_token_ids)
    answers = [
        env.tokenizer.decode(said.tokens, skip_special_tokens=True) if said.finish_reason == "stop" else None
        for said in generate(params, model_config, prompts, 0, sampling)
    ]
    return sum(said == env.answer(item) for said, item in zip(answers, env.exam)) / len(env.exam)


def curves(task: LanguageTask, records: list[LanguageRecord]) -> list[RunCurve]:
    """What its picture is drawn of, over seconds: each run, and imitation alone beside it."""
    env, none = pathlib.Path(task.env).name, np.zeros(0)
    lines = [("GRPO", one.evaluations) for one in records]
    lines += [
        ("imitation alone", [point[1:] for point in one.imitated])
        for one in records
        if one.evaluations and one.imitated
    ]
    return [RunCurve(agent, env, {}, none, none, none, *np.array(points).reshape(-1, 2).T) for agent, points in lines]


def columns(task: LanguageTask, records: list[LanguageRecord]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table of a task: names, and a row for each seed."""
    names = [name.replace("_", " ") for name in records[0].after]
    head = ("seed", *(["random weights"] if task.imitation else []), *(f"{name}, before GRPO" for name in names))
    head += (
        *(f"{name} after it" for name in names),
        "reward",
        "updates",
        "wall time",
        f"at least {task.goal:g} from",
    )
    head += ("imitation alone", "its updates") if task.imitation else ()
    return head, [_row(task, one) for one in records]


def _row(task: LanguageTask, one: LanguageRecord) -> tuple[str, ...]:
    cells = [str(one.seed)]
    if task.imitation:
        cells.append(f"{one.imitated[0][2]:.3f}" if one.imitated else "-")
    cells += [f"{value:.3f}" for value in (*one.before.values(), *one.after.values())]
    cells += ["{:.2f} to {:.2f}".format(*one.rewards), str(one.updates), f"{one.seconds:.0f} s"]
    cells.append(f"{one.reached:.0f} s" if one.reached is not None else "never")
    if task.imitation:
        last = one.imitated[-1] if one.imitated else None
        cells += [f"{last[2]:.3f}", f"{last[0]:,}"] if last else ["-", "-"]
    return tuple(cells)


def median_reached(records: list[LanguageRecord]) -> str:
    """`120 s`: the median over the seeds that reach the target."""
    reached = [one.reached for one in records if one.reached is not None]
    return f"{statistics.median(reached):.0f} s" if reached else "never"
