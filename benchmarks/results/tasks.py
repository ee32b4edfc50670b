"""What is trained, what is asked of it, and what others published."""

from __future__ import annotations

import dataclasses

ZOO = ("rl-baselines3-zoo", "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md")
CLEANRL_PPO = ("CleanRL", "https://docs.cleanrl.dev/rl-algorithms/ppo/")
CLEANRL_DQN = ("CleanRL", "https://docs.cleanrl.dev/rl-algorithms/dqn/")
CLEANRL_ENVPOOL = (
    "CleanRL",
    "https://github.com/vwxyzjn/cleanrl/blob/master/docs/benchmark/ppo_atari_envpool.md",
)


@dataclasses.dataclass(frozen=True)
class Published:
    """Somebody's figure for the same task."""

    what: str
    steps: int | None  # None: the source does not say
    mean: float
    std: float
    source: tuple[str, str]  # name, address
    note: str  # what the figure is the mean and the deviation of


@dataclasses.dataclass(frozen=True)
class Task:
    """An agent on an environment, with its preset."""

    name: str
    agent: str
    env: str
    target: float  # return of the final policy, a mean over 20 episodes
    within: int  # environment steps
    published: tuple[Published, ...]
    eval_every: int
    seeds: tuple[int, ...] = (1, 2, 3)
    seconds: float | None = None  # of wall time, after which a run is interrupted; None: it runs to its last step
    about: str = ""  # what a reader should know

    @property
    def title(self) -> str:
        """`PPO on CartPole-v1`."""
        return f"{self.agent.upper()} on {self.env}"


def _zoo(agent: str, steps: int, mean: float, std: float) -> Published:
    return Published(f"Stable-Baselines3's {agent}", steps, mean, std, ZOO, "one run; deviation over its episodes")


def _cleanrl(script: str, mean: float, std: float, source: tuple[str, str], steps: int = 500_000) -> Published:
    note = "training episodes at the end, mean and deviation over 3 seeds"
    return Published(f"CleanRL's `{script}`", steps, mean, std, source, note)


def _baselines(mean: float, std: float) -> Published:
    note = "run by CleanRL's authors, beside theirs (Huang et al. 2022)"
    return Published("OpenAI Baselines' PPO", None, mean, std, CLEANRL_PPO, note)


TASKS = (
    Task(
        name="ppo-cartpole",
        agent="ppo",
        env="CartPole-v1",
        target=475.0,
        within=100_000,
        published=(
            _zoo("PPO", 100_000, 500.0, 0.0),
            _cleanrl("ppo.py", 490.04, 6.12, CLEANRL_PPO),
            _baselines(497.54, 4.02),
        ),
        eval_every=5_000,
        about=("Seed 1 is `make demo`. Of the seeds 1 to 12, 11 end at 500.0 and one (seed 4) at 457.0."),
    ),
    Task(
        name="dqn-cartpole",
        agent="dqn",
        env="CartPole-v1",
        target=475.0,
        within=100_000,
        published=(
            _zoo("DQN", 50_000, 500.0, 0.0),
            _cleanrl("dqn_jax.py", 498.38, 2.29, CLEANRL_DQN),
            _cleanrl("dqn.py", 488.69, 16.11, CLEANRL_DQN),
        ),
        eval_every=5_000,
    ),
    Task(
        name="ppo-acrobot",
        agent="ppo",
        env="Acrobot-v1",
        target=-100.0,
        within=500_000,
        published=(
            _zoo("PPO", 1_000_000, -73.506, 18.201),
            _cleanrl("ppo.py", -86.36, 1.32, CLEANRL_PPO),
            _baselines(-81.82, 5.58),
        ),
        eval_every=25_000,
    ),
    Task(
        name="ppo-pendulum",
        agent="ppo",
        env="Pendulum-v1",
        target=-250.0,
        within=300_000,
        published=(_zoo("PPO", 100_000, -172.225, 104.159),),
        eval_every=15_000,
    ),
    Task(
        name="dqn-mountain-car",
        agent="dqn",
        env="MountainCar-v0",
        target=-115.0,
        within=150_000,
        published=(
            _zoo("DQN", 120_000, -100.849, 9.925),
            _cleanrl("dqn_jax.py", -188.90, 11.78, CLEANRL_DQN),
            _cleanrl("dqn.py", -194.95, 8.48, CLEANRL_DQN),
        ),
        eval_every=7_500,
    ),
    Task(
        name="ppo-pong",
        agent="ppo",
        env="Pong-v5",
        target=-18.0,
        within=10_000_000,
        published=(
            _zoo("PPO", 10_000_000, 20.989, 0.105),
            _cleanrl("ppo_atari_envpool.py", 20.45, 0.09, CLEANRL_ENVPOOL, steps=10_000_000),
        ),
        eval_every=200_000,
        seeds=(1,),
        seconds=3600.0,
        about=(
            "One hour on this machine, of the ten million steps that the published runs took: the question is whether "
            "the curve has clearly left -21, the score of a player that never hits the ball. The rates are annealed as "
            "for ten million steps."
        ),
    ),
)
