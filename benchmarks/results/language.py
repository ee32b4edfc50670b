"""Results of language models: GRPO from random weights, and imitation alone for the same time."""

from __future__ import annotations

import asyncio
import dataclasses
import pathlib
import random
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.results.records import RunInfo
from benchmarks.results.runs import Run
from rlframe.metrics.curves import RunCurve
from rlframe.metrics.files import read_jsonl


@dataclasses.dataclass(frozen=True)
class LanguageTask:
    """GRPO with its preset on an environment of `examples/llm`."""

    name: str
    env: str
    steps: int  # GRPO updates after the supervised warm-up
    eval_every: int
    measure: str  # name of the environment's first metric
    goal: float
    seconds: float = 900.0  # time limit of a run
    seeds: tuple[int, ...] = (1, 2, 3)
    imitation: bool = False  # True to also train imitation alone, for the time of each run
    about: str = ""

    @property
    def title(self) -> str:
        """The title, for example `GRPO on Reverse`."""
        return f"GRPO on {self.env.rpartition(':')[2]}"

    @property
    def arguments(self) -> list[str]:
        """The arguments of `rlframe train` without the seed."""
        options = ["--topology", "light_env", "--steps", str(self.steps), "--eval-every", str(self.eval_every)]
        return ["--agent", "grpo", "--env", self.env, *options]

    def command(self, seed: int) -> str:
        """Return the command line that trains a seed."""
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
            "The task is to reverse 1 to 6 lowercase letters. The measure uses 200 different strings at temperature 0. "
            "They are in no demonstration and in no training prompt: one string in ten is held out, by its checksum. "
            "The preset was chosen on another 100 held-out strings, of which 8 short ones are also in the 200. "
            "*Imitation alone* continues the supervised steps at their learning rate for the wall time of the whole "
            "run. If correct answers can be demonstrated, imitation learns faster. GRPO learns from scores only."
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
            "The task is to find a number from 1 to 15 in at most six guesses. After each guess, the game reports "
            "whether the number is smaller or larger. The demonstrations guess at random, with a mean score of 0.68. "
            "Only GRPO learns to use the hints of the game. Random guesses among the remaining numbers score 0.79, and "
            "bisection scores 0.89. The measure is over one game per number at temperature 0. At this temperature, a "
            "model that has only seen random guesses repeats the same number. *reward* is the mean score of the first "
            "and of the last ten updates, at temperature 1. The score and the preset were chosen on seeds 1 and 2, "
            "which are not shown."
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class LanguageRecord(RunInfo):
    """The record of a GRPO run, and of imitation alone for the same time."""

    updates: int  # GRPO updates
    before: dict[str, float]  # metrics of the environment after the supervised warm-up
    after: dict[str, float]  # metrics of the environment at the end
    rewards: tuple[float, float]  # mean scores of the first and of the last 10 updates, sampled at temperature 1
    # seconds of the evaluation from which on all are at or above the goal; None if the last one is below
    reached: float | None
    evaluations: list[list[float]]  # [seconds, measure]
    imitated: list[list[float]]  # imitation alone: [updates, seconds, measure]

    @property
    def value(self) -> float:
        """The measure at the end."""
        return next(iter(self.after.values()))

    def passed(self, task: LanguageTask) -> bool:
        """Return True if the run reached the goal at the end, within its time limit."""
        return self.value >= task.goal and self.seconds <= task.seconds


def language_record(task: LanguageTask, run: Run, run_info: RunInfo) -> LanguageRecord:
    """Return the record of a finished run. If the task requires it, also train imitation alone."""
    rows = read_jsonl(run.directory / "metrics.jsonl")
    evaluated = [row for row in rows if "return_mean" in row]
    rewards = [row["reward"] for row in rows if "reward" in row]
    reached = None
    for row in reversed(evaluated):
        if row["return_mean"] < task.goal:
            break
        reached = row["wall_seconds"]
    return LanguageRecord(
        **vars(run_info),
        updates=evaluated[-1]["step"] - evaluated[0]["step"],
        before=_metrics(evaluated[0]),
        after=_metrics(evaluated[-1]),
        rewards=(statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])),
        reached=reached,
        evaluations=[[row["wall_seconds"], row["return_mean"]] for row in evaluated],
        imitated=imitate(task, run.seed, run.seconds) if task.imitation else [],
    )


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    """Return the metrics in a row of an evaluation, such as `{"exact_match": 0.9}`."""
    return {name.partition("/")[2]: value for name, value in row.items() if name.startswith("eval/")}


def imitate(task: LanguageTask, seed: int, seconds: float) -> list[list[float]]:
    """Continue the supervised steps of a run for `seconds`, including compilation and evaluations.

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
    schedule = {"learning_rate": cfg.supervised_learning_rate, "total_learner_steps": cfg.supervised_steps}
    agent = GRPO(dataclasses.replace(cfg, loss="sft", **schedule))
    # the same initial parameters as in rlframe.language.warm_up
    params = agent.initial_params(jax.random.PRNGKey(seed))
    state = agent.initial_learner_state(params)
    update = compilation.jit(agent.learner_step, differentiates=True)
    source = random.Random(seed)
    evaluations: list[list[float]] = []
    step, due = 0, 0
    while True:
        ended = time.monotonic() - began >= seconds
        if step >= due or ended:
            due = step + (50 if step < cfg.supervised_steps else 500)
            accuracy = _accuracy(env, agent.model_config, params)
            evaluations.append([step, round(time.monotonic() - began, 1), accuracy])
        if ended:
            break
        pairs = env.demonstrations(source, cfg.supervised_batch_size)
        params, state, _ = update(params, state, demonstration_batch(env.tokenizer, pairs, cfg.max_tokens))
        step += 1
    asyncio.run(env.close())
    return evaluations


def _accuracy(env: Any, model_config: Any, params: Any) -> float:
    """Return the fraction of the environment's exam that the model answers correctly at temperature 0."""
    from rlframe.language.decoding import SamplingParams, generate

    prompts = [env.tokenizer.encode(env.prompt(item)) for item in env.exam]
    longest = max(len(env.answer(item)) for item in env.exam) + 1
    sampling = SamplingParams(max_tokens=longest, temperature=0.0, stop_tokens=env.tokenizer.stop_token_ids)
    answers = [
        env.tokenizer.decode(sample.tokens, skip_special_tokens=True) if sample.finish_reason == "stop" else None
        for sample in generate(params, model_config, prompts, 0, sampling)
    ]
    return sum(sample == env.answer(item) for sample, item in zip(answers, env.exam)) / len(env.exam)


def curves(task: LanguageTask, records: list[LanguageRecord]) -> list[RunCurve]:
    """Return the curves of the picture over seconds: each run, and imitation alone if it was trained."""
    env, none = pathlib.Path(task.env).name, np.zeros(0)
    lines = [("GRPO", record.evaluations) for record in records]
    lines += [
        ("imitation alone", [point[1:] for point in record.imitated])
        for record in records
        if record.evaluations and record.imitated
    ]
    return [RunCurve(agent, env, {}, none, none, none, *np.array(points).reshape(-1, 2).T) for agent, points in lines]


def columns(task: LanguageTask, records: list[LanguageRecord]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the table of a task: column names, and one row per seed."""
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
    return head, [_row(task, record) for record in records]


def _row(task: LanguageTask, record: LanguageRecord) -> tuple[str, ...]:
    cells = [str(record.seed)]
    if task.imitation:
        cells.append(f"{record.imitated[0][2]:.3f}" if record.imitated else "-")
    cells += [f"{value:.3f}" for value in (*record.before.values(), *record.after.values())]
    cells += ["{:.2f} to {:.2f}".format(*record.rewards), str(record.updates), f"{record.seconds:.0f} s"]
    cells.append(f"{record.reached:.0f} s" if record.reached is not None else "never")
    if task.imitation:
        last = record.imitated[-1] if record.imitated else None
        cells += [f"{last[2]:.3f}", f"{last[0]:,}"] if last else ["-", "-"]
    return tuple(cells)


def median_reached(records: list[LanguageRecord]) -> str:
    """Return the median time to the goal, such as `120 s`, over the seeds that reach it."""
    reached = [record.reached for record in records if record.reached is not None]
    return f"{statistics.median(reached):.0f} s" if reached else "never"
