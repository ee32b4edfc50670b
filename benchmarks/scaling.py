"""Scaling of a program with its actors: the model of benchmarks/notes/scaling.md, and a simulation with queues.

The model is a minimum. Each part of a program (actors, shards of the replay service, the learner, the inference
service, the network) has a maximum number of environment steps per second, and the lowest maximum is the limit. The
simulation (SimPy) runs the same program message by message. `rlframe bench scaling` prints both and draws
docs/images/scaling.png.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import random
from collections.abc import Callable, Generator
from typing import Any

import simpy

from benchmarks.context import Context
from benchmarks.report import Row, Table

IMAGE = pathlib.Path(__file__).parents[1] / "docs/images/scaling.png"
ACTORS = (1, 3, 10, 30, 100, 180, 300, 560, 1000)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Busy seconds of a core for CartPole with two layers of 64, as measured in benchmarks/notes/scaling.md."""

    step: float = 316e-6  # an actor's step: pool, inference on a CPU, replay, and the Actor itself
    step_env: float = 2.1e-6  # added for each environment in the step
    remote: float = 300e-6  # an actor's step with an inference service, whose call takes about as long
    insert: float = 30e-6  # a message of unrolls, at the receiving shard
    insert_step: float = 0.163e-6  # added for each environment step in it
    draw: float = 30e-6  # a batch of unrolls, at the sending shard
    draw_step: float = 0.26e-6  # added for each environment step in it
    byte: float = 0.2e-9  # added for each byte of a message or a batch
    update: float = 1.5e-3  # a learner's update, including the end of the draw and the new version
    update_step: float = 0.75e-6  # added for each environment step in the batch
    call: float = 107e-6  # transfer of a request of 64 rows and its response
    batch: float = 20e-6  # the service's call of the network, for all waiting requests
    batch_row: float = 0.2e-6  # added for each row
    request: float = 190e-6  # added for each request: receive, batch, respond


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of the topology distributed, or of light_env if `service` is True."""

    actors: int
    envs: int = 8  # environments per actor
    env_seconds: float = 1e-3  # duration of one environment step; an actor steps its environments one after another
    spread: float = 0.5  # standard deviation of env_seconds, as a fraction of it
    unroll: int = 20  # steps per unroll
    batch: int = 64  # unrolls per batch
    shards: int = 1
    queued: int = 2  # batches in the queue of a shard before writers wait
    service: bool = False  # True: one inference service; False: inference in each actor
    rows: int = 512  # maximum rows per call of the service
    param_bytes: float = 40e3  # bytes per version of the parameters
    step_bytes: float = 40.0  # bytes per environment step
    actors_per_node: int = 32
    bandwidth: float = 1.25e9  # bytes per second from and to the learner's node: 10 Gbit/s
    cores: int | None = None  # cores shared by all parts on one machine; None: one core per part
    costs: Costs = Costs()

    @property
    def nodes(self) -> int:
        """Number of machines with actors."""
        return -(-self.actors // self.actors_per_node)

    @property
    def steps_per_message(self) -> int:
        """Environment steps per message: one unroll of each environment of an actor."""
        return self.envs * self.unroll

    @property
    def messages_per_batch(self) -> int:
        """Messages per batch."""
        return max(1, self.batch // self.envs)

    @property
    def steps(self) -> int:
        """Environment steps per batch."""
        return self.steps_per_message * self.messages_per_batch

    @property
    def step_seconds(self) -> float:
        """Seconds of an actor's step, without waiting for a service."""
        own = self.costs.remote if self.service else self.costs.step
        return own + self.envs * (self.costs.step_env + self.env_seconds)

    def answer_seconds(self, rows: int) -> float:
        """Return the seconds of the service for `rows` rows, with the rows of one actor in each request."""
        costs = self.costs
        return costs.batch + costs.batch_row * rows + costs.request * rows / self.envs

    @property
    def insert_seconds(self) -> float:
        """Seconds of a shard per message."""
        return self.costs.insert + (self.costs.insert_step + self.costs.byte * self.step_bytes) * self.steps_per_message

    @property
    def draw_seconds(self) -> float:
        """Seconds of a shard per batch."""
        return self.costs.draw + (self.costs.draw_step + self.costs.byte * self.step_bytes) * self.steps

    @property
    def update_seconds(self) -> float:
        """Seconds of the learner per batch, after its arrival."""
        return self.costs.update + self.costs.update_step * self.steps

    @property
    def arrival_seconds(self) -> float:
        """Seconds from the request of a batch to its arrival at the learner, without the shard's own time."""
        return self.costs.call + self.step_bytes * self.steps / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The performance of a program."""

    steps: float  # environment steps per second
    staleness: float  # versions between the start of an unroll and its update
    bound_by: str = ""


def limits(program: Program) -> dict[str, float]:
    """Return the maximum environment steps per second of each part."""
    costs = program.costs
    step_seconds = program.step_seconds  # seconds of an actor's step
    found = {}
    if program.service:
        found["inference"] = program.rows / program.answer_seconds(program.rows)
        step_seconds += costs.call + program.answer_seconds(program.envs)
    found["actors"] = program.actors * program.envs / step_seconds
    found["shards"] = program.shards / (
        program.insert_seconds / program.steps_per_message + program.draw_seconds / program.steps
    )
    found["draws"] = program.steps / (program.draw_seconds + program.arrival_seconds)
    found["learner"] = program.steps / program.update_seconds
    if program.cores is not None:
        core = program.step_seconds / program.envs + program.insert_seconds / program.steps_per_message
        core += (program.draw_seconds + program.update_seconds) / program.steps
        if program.service:
            core += (program.answer_seconds(program.envs) + costs.call) / program.envs
        found["cores"] = program.cores / core
    return found


def model(program: Program) -> Outcome:
    """Return the lowest limit, and the staleness of experience that waits for the limiting part."""
    found = limits(program)
    bound_by = min(found, key=lambda name: found[name])
    steps = found[bound_by]
    versions = steps / program.steps  # versions per second
    acting = program.actors * program.steps_per_message / found["actors"]  # seconds per unroll
    gathering = 0.5 * (min(program.shards, program.actors) - 1)  # versions until a shard has a full batch
    fetching = program.param_bytes / program.bandwidth * (1 + program.nodes / 2)  # mean seconds per node
    if bound_by == "actors":
        return Outcome(steps, versions * (acting + fetching) + gathering, bound_by)
    # All buffers are full: unrolls at the actors, queues, and batches that the learner has fetched ahead.
    full = program.actors * program.steps_per_message / program.steps + program.queued * program.shards
    full += 2 if bound_by == "learner" else 1
    return Outcome(steps, full + versions * fetching, bound_by)


def simulate(program: Program, seconds: float, seed: int = 0) -> Outcome:
    """Run the program message by message for three times `seconds`. Only the last two thirds are counted."""
    run = _Simulation(program, random.Random(seed))
    run.env.run(seconds)
    run.steps, run.staleness = 0, []
    run.env.run(3.0 * seconds)
    return Outcome(run.steps / (2.0 * seconds), sum(run.staleness) / max(1, len(run.staleness)))


class _Simulation:
    def __init__(self, program: Program, chance: random.Random) -> None:
        self.env = simpy.Environment()
        self.steps, self.staleness = 0, list[float]()
        self._program, self._chance = program, chance
        self._cores = None if program.cores is None else simpy.Resource(self.env, program.cores)
        # Threads of a shard alternate: a draw does not wait for all earlier inserts.
        self._shards = [simpy.PriorityResource(self.env) for _ in range(program.shards)]
        room = program.queued * program.messages_per_batch
        self._queues = [simpy.Store(self.env, room) for _ in range(program.shards)]
        self._network = simpy.Resource(self.env)
        self._published, self._added = self.env.event(), self.env.event()
        self._version, self._node_versions = 0, [0] * program.nodes
        self._requests = simpy.Store(self.env)
        self._drawn = simpy.Store(self.env, 1)  # a batch that was fetched ahead
        self.env.process(self._draws())
        self.env.process(self._learner())
        for node in range(program.nodes):
            self.env.process(self._fetching(node))
        if program.service:
            self.env.process(self._service())
        for rank in range(program.actors):
            self.env.process(self._actor(rank))

    def _work(self, seconds: float) -> Generator[Any, Any, None]:
        if self._cores is None:
            yield self.env.timeout(seconds)
            return
        with self._cores.request() as core:
            yield core
            yield self.env.timeout(seconds)

    def _random_step_seconds(self, steps: int) -> float:
        """Return the seconds of `steps` steps. The environments' own time is random."""
        program = self._program
        count = steps * program.envs
        fixed, mean = steps * program.step_seconds - count * program.env_seconds, count * program.env_seconds
        if not mean or not program.spread:
            return fixed + mean
        shape = count / program.spread**2
        return fixed + self._chance.gammavariate(shape, mean / shape)

    def _actor(self, rank: int) -> Generator[Any, Any, None]:
        program, shard = self._program, rank % self._program.shards
        node = rank // program.actors_per_node
        yield self.env.timeout(self._chance.random() * program.unroll * program.step_seconds)
        while True:
            version = self._node_versions[node]
            if program.service:
                version = self._version
                for _ in range(program.unroll):
                    yield from self._work(self._random_step_seconds(1))
                    yield self.env.timeout(program.costs.call)
                    answered = self.env.event()
                    yield self._requests.put(answered)
                    yield answered
            else:
                yield from self._work(self._random_step_seconds(program.unroll))
            with self._shards[shard].request(priority=1) as turn:
                yield turn
                yield from self._work(program.insert_seconds)
            yield self._queues[shard].put(version)
            added, self._added = self._added, self.env.event()
            added.succeed()

    def _service(self) -> Generator[Any, Any, None]:
        program, most = self._program, max(1, self._program.rows // self._program.envs)
        while True:
            taken = [(yield self._requests.get())]
            while self._requests.items and len(taken) < most:
                taken.append((yield self._requests.get()))
            rows = len(taken) * program.envs
            yield from self._work(program.answer_seconds(rows))
            for answered in taken:
                answered.succeed()

    def _draws(self) -> Generator[Any, Any, None]:
        program, first = self._program, 0
        while True:
            order = [(first + i) % program.shards for i in range(program.shards)]
            shard = next((each for each in order if len(self._queues[each].items) >= program.messages_per_batch), None)
            if shard is None:
                yield self._added
                continue
            first = shard + 1
            versions = []
            for _ in range(program.messages_per_batch):
                versions.append((yield self._queues[shard].get()))
            with self._shards[shard].request(priority=0) as turn:
                yield turn
                yield from self._work(program.draw_seconds)
            yield self.env.timeout(program.arrival_seconds)
            yield self._drawn.put(sum(versions) / len(versions))

    def _learner(self) -> Generator[Any, Any, None]:
        while True:
            version = yield self._drawn.get()
            yield from self._work(self._program.update_seconds)
            self.steps += self._program.steps
            self.staleness.append(self._version - version)
            self._version += 1
            published, self._published = self._published, self.env.event()
            published.succeed()

    def _fetching(self, node: int) -> Generator[Any, Any, None]:
        """Fetch the newest version for a node, once for all its actors, whenever there is one."""
        program = self._program
        while True:
            if self._node_versions[node] == self._version:
                yield self._published
            with self._network.request() as turn:
                yield turn
                version = self._version
                yield self.env.timeout(program.param_bytes / program.bandwidth)
            self._node_versions[node] = version


# An image network on the actors' cores, and 28 kB per step. The learner has a device, so its speed does not change.
_FRAMES = functools.partial(Program, step_bytes=28_224.0, costs=Costs(step_env=155e-6))
PROGRAMS: dict[str, Callable[[int], Program]] = {
    "an environment of 1 ms": Program,
    "batches of 16 unrolls, not 64": functools.partial(Program, batch=16),
    "inference by a service": functools.partial(Program, service=True),
    "the same, 64 environments per actor": functools.partial(Program, service=True, envs=64, env_seconds=125e-6),
    "40 MB of parameters, not 40 kB": functools.partial(Program, param_bytes=40e6),
    "28 kB per step, one shard": _FRAMES,
    "the same, four shards, 100 Gbit/s": functools.partial(_FRAMES, shards=4, bandwidth=12.5e9),
}


def run(context: Context, log: Callable[[str], None] = print) -> list[Table]:
    """Run the simulation and draw the curves; see `benchmarks.runner`."""
    tables, curves = [], {}
    for name, make in PROGRAMS.items():
        log(name)
        most = ACTORS[: 4 if context.quick else None]
        curves[name] = [(make(actors), simulate(make(actors), long_enough(make(actors)))) for actors in most]
        rows = [
            Row(f"{program.actors} actors", seen.steps, None, _model_note(program)) for program, seen in curves[name]
        ]
        tables.append(Table(f"{name}, simulated", "env steps/s", rows[-1], tuple(rows[:-1]), ratios=False))
    if not context.quick:
        draw(curves)
    return tables


def _model_note(program: Program) -> str:
    expected = model(program)
    return f"model: {expected.steps:,.0f}, limited by {expected.bound_by}; staleness {expected.staleness:.1f}"


def long_enough(program: Program) -> float:
    """Return a duration in which each actor sends several unrolls and the learner makes several updates."""
    per_second = model(program).steps
    everyone = 4 * program.actors * program.steps_per_message / per_second
    return max(everyone, 20 * program.steps / per_second, 0.2 if program.service else 0.5)


def draw(curves: dict[str, list[tuple[Program, Outcome]]], path: pathlib.Path = IMAGE) -> None:
    """Draw the model as lines and the simulation as points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (speed, age) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for color, (name, points) in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"], curves.items(), strict=False):
        most = max(program.actors for program, _ in points)
        fine = [
            dataclasses.replace(points[0][0], actors=round(10 ** (i / 40)))
            for i in range(round(40 * math.log10(most)) + 1)
        ]
        counts = [program.actors for program in fine]
        expected = [model(program) for program in fine]
        seen_at = [program.actors for program, _ in points]
        speed.plot(counts, [one.steps for one in expected], color=color, label=name)
        speed.plot(seen_at, [seen.steps for _, seen in points], "o", color=color)
        age.plot(counts, [one.staleness for one in expected], color=color)
        age.plot(seen_at, [seen.staleness for _, seen in points], "o", color=color)
    for axes, title in ((speed, "environment steps a second"), (age, "staleness, versions")):
        axes.set(xscale="log", yscale="log", xlabel="actors", title=title)
        axes.grid(alpha=0.3, which="both")
    speed.legend(fontsize=8, title="lines: the model; points: the simulation", title_fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
