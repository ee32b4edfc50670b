"""Language models: what GRPO makes of random weights, and what imitation alone makes of them in the same time."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pathlib
import random
import shutil
import statistics
import time
from typing import Any

from benchmarks.results import runs
from rlframe.metrics import JSONLLogger
from rlframe.metrics.files import read_jsonl


@dataclasses.dataclass(frozen=True)
class LanguageTask:
    """GRPO on an environment of `examples/llm`, with its preset."""

    name: str
    env: str
    steps: int  # updates of GRPO, after the supervised ones
    eval_every: int
    measure: str  # what the environment's first metric is
    target: float
    seconds: float = 900.0  # that a run may take
    seeds: tuple[int, ...] = (1, 2, 3)
    imitation: bool = False  # whether imitation alone is shown beside it, for as long as each run took
    about: str = ""

    @property
    def title(self) -> str:
        """`GRPO on Reverse`."""
        return f"GRPO on {self.env.rpartition(':')[2]}"


TASKS = (
    LanguageTask(
        name="grpo-reverse",
        env="examples/llm/reverse.py:Reverse",
        steps=200,
        eval_every=50,
        measure="exact match",
        target=0.9,
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
        target=0.7,
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
class Outcome:
    """What became of one seed."""

    seed: int
    updates: int  # of GRPO
    seconds: float  # wall time of the process
    before: dict[str, float]  # the environment's evaluation after the supervised steps
    after: dict[str, float]  # at the end
    rewards: tuple[float, float]  # mean scores of the first and of the last 10 updates, sampled at temperature 1
    reached: float | None  # seconds of the first evaluation at or above the target, and of all after it
    imitated: list[dict[str, Any]]  # rows of imitation alone
    date: str
    machine: str
    load: float  # as in `runs.Outcome`
    versions: dict[str, str]
    command: str

    @property
    def value(self) -> float:
        """Of the measure, at the end."""
        return next(iter(self.after.values()))

    def passed(self, task: LanguageTask) -> bool:
        """Whether it is good enough at the end, and that in time."""
        return self.value >= task.target and self.seconds <= task.seconds


def train(task: LanguageTask, seed: int) -> None:
    """Trains one seed, and imitates for as long where that is asked for."""
    directory = runs.run_dir(task, seed)
    if not runs.is_finished(task, seed):
        runs.run(
            directory,
            ["--agent", "grpo", "--env", task.env, "--topology", "light_env", "--seed", str(seed)]
            + ["--steps", str(task.steps), "--eval-every", str(task.eval_every)],
        )
    alone = imitation_dir(task, seed)
    if task.imitation and not (runs.ROOT / alone / runs.RECORD).is_file():
        imitate(task, seed, runs.read_record(directory)["seconds"])


def imitation_dir(task: LanguageTask, seed: int) -> pathlib.Path:
    """Where a run of imitation alone is, from `ROOT`."""
    return runs.RUNS / f"{task.name}-imitation-seed{seed}"


def imitate(task: LanguageTask, seed: int, seconds: float) -> None:
    """The run's supervised steps, which go on for so many seconds, compilation and evaluations included."""
    import jax

    from rlframe import compilation
    from rlframe.agents.grpo import GRPO
    from rlframe.learners.warm_up import demonstration_batch
    from rlframe.programs.experiment import make_experiment
    from rlframe.programs.language.environment import env_class

    directory = runs.ROOT / imitation_dir(task, seed)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    named = {"agent": "imitation alone", "env": task.env, "seed": seed}
    (directory / "config.json").write_text(json.dumps({"experiment": named}))

    began = time.monotonic()
    described = make_experiment("grpo", task.env)
    env_cls: Any = env_class(task.env)
    env = env_cls(*env_cls.config_init())
    asyncio.run(env.setup())
    cfg = described.agent_config
    pupil = GRPO(dataclasses.replace(cfg, loss="sft", learning_rate=cfg.supervised_learning_rate))
    params = pupil.initial_params(jax.random.PRNGKey(seed))  # just as rlframe.learners.warm_up begins
    state = pupil.initial_learner_state(params)
    update = compilation.jit(pupil.learner_step, differentiates=True)
    source = random.Random(seed)
    logger = JSONLLogger(directory / "metrics.jsonl")
    step, due = 0, 0
    while True:
        ended = time.monotonic() - began >= seconds
        if step >= due or ended:
            due = step + (50 if step < cfg.supervised_steps else 500)
            solved = _solved(env, pupil.model_config, params)
            logger.write(step, {"return_mean": solved, "wall_seconds": time.monotonic() - began})
        if ended:
            break
        pairs = env.demonstrations(source, cfg.supervised_batch_size)
        params, state, _ = update(params, state, demonstration_batch(env.tokenizer, pairs, cfg.max_tokens))
        step += 1
    logger.close()
    asyncio.run(env.close())
    runs.write_record(imitation_dir(task, seed), {}, time.monotonic() - began, [])


def _solved(env: Any, model_config: Any, params: Any) -> float:
    """The part of the environment's exam that the model answers rightly at temperature 0."""
    from rlframe.language.decoding.sampling import SamplingParams, generate

    prompts = [env.tokenizer.encode(env.prompt(item)) for item in env.exam]
    longest = max(len(env.answer(item)) for item in env.exam) + 1
    sampling = SamplingParams(max_tokens=longest, temperature=0.0, stop_tokens=env.tokenizer.stop_token_ids)
    answers = [
        env.tokenizer.decode(said.tokens, skip_special_tokens=True) if said.finish_reason == "stop" else None
        for said in generate(params, model_config, prompts, 0, sampling)
    ]
    return sum(said == env.answer(item) for said, item in zip(answers, env.exam)) / len(env.exam)


def load(task: LanguageTask, seed: int) -> Outcome:
    """What a finished run left."""
    directory = runs.run_dir(task, seed)
    record = runs.read_record(directory)
    rows = read_jsonl(runs.ROOT / directory / "metrics.jsonl")
    evaluated = [row for row in rows if "return_mean" in row]
    rewards = [row["reward"] for row in rows if "reward" in row]
    reached = None
    for row in reversed(evaluated):
        if row["return_mean"] < task.target:
            break
        reached = row["wall_seconds"]
    alone = runs.ROOT / imitation_dir(task, seed)
    return Outcome(
        seed=seed,
        updates=evaluated[-1]["step"] - evaluated[0]["step"],
        seconds=record["seconds"],
        before=_metrics(evaluated[0]),
        after=_metrics(evaluated[-1]),
        rewards=(statistics.mean(rewards[:10]), statistics.mean(rewards[-10:])),
        reached=reached,
        imitated=read_jsonl(alone / "metrics.jsonl") if (alone / runs.RECORD).is_file() else [],
        date=record["date"],
        machine=record["machine"],
        load=record["load"],
        command=" ".join(record["command"][: record["command"].index("--json")]),
        versions=json.loads((runs.ROOT / directory / "config.json").read_text())["notes"]["versions"],
    )


def _metrics(row: dict[str, Any]) -> dict[str, float]:
    """`{"exact_match": 0.9}` of a row of an evaluation."""
    return {name.partition("/")[2]: value for name, value in row.items() if name.startswith("eval/")}


def columns(task: LanguageTask, outcomes: list[Outcome]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table of a task: names, and a row for each seed."""
    names = [name.replace("_", " ") for name in outcomes[0].after]
    head = ("seed", *(["random weights"] if task.imitation else []), *(f"{name}, before GRPO" for name in names))
    head += (
        *(f"{name} after it" for name in names),
        "reward",
        "updates",
        "wall time",
        f"at least {task.target:g} from",
    )
    head += ("imitation alone", "its updates") if task.imitation else ()
    return head, [_row(task, one) for one in outcomes]


def _row(task: LanguageTask, one: Outcome) -> tuple[str, ...]:
    cells = [str(one.seed)]
    if task.imitation:
        cells.append(f"{one.imitated[0]['return_mean']:.3f}" if one.imitated else "-")
    cells += [f"{value:.3f}" for value in (*one.before.values(), *one.after.values())]
    cells += ["{:.2f} to {:.2f}".format(*one.rewards), str(one.updates), f"{one.seconds:.0f} s"]
    cells.append(f"{one.reached:.0f} s" if one.reached is not None else "never")
    if task.imitation:
        last = one.imitated[-1] if one.imitated else None
        cells += [f"{last['return_mean']:.3f}", f"{last['step']:,}"] if last else ["-", "-"]
    return tuple(cells)


def median_reached(outcomes: list[Outcome]) -> str:
    """`120 s`: the median over the seeds that reach the target."""
    reached = [one.reached for one in outcomes if one.reached is not None]
    return f"{statistics.median(reached):.0f} s" if reached else "never"
