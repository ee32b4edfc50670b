"""The tasks of the topology fused, with JAX environments."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.results.task import Published, Task, zoo

GYMNAX = ("gymnax", "https://github.com/RobertTLange/gymnax")
_FUSED = ("--topology", "fused")
_NO_SEARCH = "Nothing was searched for here. The settings are those of {}."

TASKS = (
    Task(
        name="ppo-cartpole-fused",
        agent="ppo",
        env="jax:CartPole-v1",
        options=_FUSED,
        variant=" under fused",
        goal=475.0,
        steps=100_000,
        measure="final",
        tuned=_NO_SEARCH.format("CartPole-v1, which were chosen on the seeds 1 to 32"),
        published=(zoo("PPO", 100_000, 500.0, 0.0),),
        eval_every=5_000,
        seeds=(101, 102, 103),
    ),
    Task(
        name="ppo-acrobot-fused",
        agent="ppo",
        env="jax:Acrobot-v1",
        options=_FUSED,
        variant=" under fused",
        goal=-100.0,
        steps=500_000,
        measure="final",
        tuned=_NO_SEARCH.format("Acrobot-v1"),
        published=(zoo("PPO", 1_000_000, -73.506, 18.201),),
        eval_every=25_000,
        seeds=(101, 102, 103),
    ),
    Task(
        name="sac-pendulum-fused",
        agent="sac",
        env="jax:Pendulum-v1",
        options=_FUSED,
        variant=" under fused",
        goal=-200.0,
        steps=20_000,
        tuned=_NO_SEARCH.format("Pendulum-v1"),
        published=(zoo("SAC", 20_000, -156.995, 88.714),),
        eval_every=1_000,
        seeds=(101, 102, 103),
    ),
    Task(
        name="ppo-position-only-cartpole-fused",
        agent="ppo",
        env="jax:PositionOnlyCartPole-v1",
        options=_FUSED,
        variant=" with a GRU under fused",
        goal=450.0,
        steps=300_000,
        tuned=_NO_SEARCH.format(
            "PositionOnlyCartPole-v1, which were chosen on the seeds 11 to 13, 21 to 28 and 31 to 42 "
            "(benchmarks/notes/position-only-cartpole.md)"
        ),
        published=(),
        eval_every=15_000,
        seeds=(101, 102, 103),
        about="CartPole without velocities, which requires memory. No comparable figure was found.",
    ),
    *(
        Task(
            name=f"{agent}-minatar-{game.lower()}-fused",
            agent=agent,
            env=f"gymnax:{game}-MinAtar",
            options=_FUSED,
            variant=" under fused",
            goal=goal,
            steps=10_000_000,
            tuned=f"Nothing was tuned. The values and the network are those of {source}.",
            published=(
                Published(
                    "gymnax-blines' PPO",
                    *(10_000_000, goal, None, GYMNAX),
                    "the table of gymnax's README; actions are sampled in its evaluations",
                ),
            ),
            eval_every=500_000,
            seeds=(101,),
            long=True,
            about="One seed. Needs the extra `gymnax`.",
        )
        for agent, game, goal, source in (
            ("ppo", "Breakout", 28.0, "gymnax-blines"),
            ("ppo", "Asterix", 15.0, "gymnax-blines"),
            ("pqn", "Breakout", 28.0, "purejaxql"),
        )
    ),
    *(
        Task(
            name=f"ppo-cartpole-ten-{name}",
            agent="ppo",
            env="jax:CartPole-v1",
            options=("--topology", topology),
            variant=f" under {topology}, ten seeds",
            goal=475.0,
            steps=100_000,
            tuned=_NO_SEARCH.format("CartPole-v1, which were chosen on the seeds 1 to 32"),
            published=(),
            eval_every=5_000,
            seeds=tuple(range(111, 121)),
            about="For the comparison of fused and inline training below.",
        )
        for name, topology in (("fused", "fused"), ("inline", "single_process"))
    ),
)


class Comparison(NamedTuple):
    """Tasks that must learn equally fast: the intervals of their mean training returns at half the steps overlap."""

    title: str
    tasks: tuple[Task, ...]


COMPARISONS = (
    Comparison(
        "Fused and inline training",
        tuple(task for task in TASKS if task.name.startswith("ppo-cartpole-ten-")),
    ),
)
