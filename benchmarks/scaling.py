"""How a program grows with its actors: the model of docs/scaling.md, and a simulation that has queues and chance.

The model is a minimum: each part of a program (actors, shards of the replay service, the learner, the inference
service, its network) can carry so many environment steps a second, and the least decides. The simulation (SimPy) runs
the same program message by message. `rlframe bench scaling` prints both and draws docs/images/scaling.png.
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
    """Seconds that a core is busy: CartPole, two layers of 64. docs/scaling.md says how each was measured."""

    step: float = 316e-6  # an actor's step: the pool, inference on a CPU, replay, itself
    step_env: float = 2.1e-6  # and for each environment in it
    remote: float = 300e-6  # the first where a service has inference: the call takes as long
    insert: float = 30e-6  # a message of unrolls, at the shard that takes it
    insert_step: float = 0.163e-6
    draw: float = 30e-6  # a batch of unrolls, at the shard that gives it
    draw_step: float = 0.26e-6
    byte: float = 0.2e-9  # for each byte of either
    update: float = 1.5e-3  # a learner's update, with the draw's end and the new version
    update_step: float = 0.75e-6  # for each environment step in the batch
    call: float = 107e-6  # a request of 64 rows and its answer, on their way
    batch: float = 20e-6  # the service's call of the network, for as many requests as wait
    batch_row: float = 0.2e-6
    request: float = 190e-6  # and what it does for each request: read it, put it with others, answer


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of the topology distributed, or of light_env where there is a service of inference."""

    actors: int
    envs: int = 8  # of an actor
    env_seconds: float = 1e-3  # that a step of one environment takes; an actor steps its own one after another
    spread: float = 0.5  # standard deviation of that, as a share of it
    unroll: int = 20  # steps
    batch: int = 64  # unrolls
    shards: int = 1
    queued: int = 2  # batches that a shard holds before writers wait
    service: bool = False  # inference by one service; False: at each actor
    rows: int = 512  # that a call of the service takes at most
    param_bytes: float = 40e3  # of a version
    step_bytes: float = 40.0  # of experience
    actors_per_node: int = 32
    bandwidth: float = 1.25e9  # bytes a second out of, and into, the learner's node: 10 Gbit/s
    cores: int | None = None  # that all of it shares, on one machine; None: each part has one of its own
    costs: Costs = Costs()

    @property
    def nodes(self) -> int:
        """Machines that have actors."""
        return -(-self.actors // self.actors_per_node)

    @property
    def message(self) -> int:
        """Environment steps of a message: an unroll of each environment of an actor."""
        return self.envs * self.unroll

    @property
    def messages(self) -> int:
        """Messages of a batch."""
        return max(1, self.batch // self.envs)

    @property
    def steps(self) -> int:
        """Environment steps of a batch."""
        return self.message * self.messages

    @property
    def stepping(self) -> float:
        """Seconds of an actor's step, less what it waits for a service."""
        own = self.costs.remote if self.service else self.costs.step
        return own + self.envs * (self.costs.step_env + self.env_seconds)

    def answering(self, rows: int) -> float:
        """Seconds of the service for so many rows, an actor's in each request."""
        costs = self.costs
        return costs.batch + costs.batch_row * rows + costs.request * rows / self.envs

    @property
    def inserting(self) -> float:
        """Seconds of a shard for a message."""
        return self.costs.insert + (self.costs.insert_step + self.costs.byte * self.step_bytes) * self.message

    @property
    def drawing(self) -> float:
        """Seconds of a shard for a batch."""
        return self.costs.draw + (self.costs.draw_step + self.costs.byte * self.step_bytes) * self.steps

    @property
    def updating(self) -> float:
        """Seconds of the learner for a batch, once it has it."""
        return self.costs.update + self.costs.update_step * self.steps

    @property
    def arriving(self) -> float:
        """Seconds until a batch that was asked for is at the learner, less those of the shard."""
        return self.costs.call + self.step_bytes * self.steps / self.bandwidth


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a program does in a second."""

    steps: float  # of environments
    staleness: float  # versions between the one that began an unroll and the one that learned from it
    bound_by: str = ""


def limits(program: Program) -> dict[str, float]:
    """Environment steps a second that each part could carry alone."""
    costs = program.costs
    a_step = program.stepping  # of an actor, in seconds
    found = {}
    if program.service:
        found["inference"] = program.rows / program.answering(program.rows)
        a_step += costs.call + program.answering(program.envs)
    found["actors"] = program.actors * program.envs / a_step
    found["shards"] = program.shards / (program.inserting / program.message + program.drawing / program.steps)
    found["draws"] = program.steps / (program.drawing + program.arriving)
    found["learner"] = program.steps / program.updating
    if program.cores is not None:
        core = program.stepping / program.envs + program.inserting / program.message
        core += (program.drawing + program.updating) / program.steps
        if program.service:
            core += (program.answering(program.envs) + costs.call) / program.envs
        found["cores"] = program.cores / core
    return found


def model(program: Program) -> Outcome:
    """The least of the limits; and how old experience is that waits for what bounds it."""
    found = limits(program)
    bound_by = min(found, key=lambda name: found[name])
    steps = found[bound_by]
    versions = steps / program.steps  # a second
    acting = program.actors * program.message / found["actors"]  # seconds of an unroll
    gathering = 0.5 * (min(program.shards, program.actors) - 1)  # versions until a shard has a batch
    fetching = program.param_bytes / program.bandwidth * (1 + program.nodes / 2)  # seconds, of a node, on average
    if bound_by == "actors":
        return Outcome(steps, versions * (acting + fetching) + gathering, bound_by)
    # All that there is room for is full: unrolls in the hands of actors, queues, and what the learner has drawn ahead.
    full = program.actors * program.message / program.steps + program.queued * program.shards
    full += 2 if bound_by == "learner" else 1
    return Outcome(steps, full + versions * fetching, bound_by)


def simulate(program: Program, seconds: float, seed: int = 0) -> Outcome:
    """Runs the program, message by message, for three times `seconds`, of which the last two count."""
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
        # A shard's threads take turns: a draw does not wait for all inserts that have come before it.
        self._shards = [simpy.PriorityResource(self.env) for _ in range(program.shards)]
        room = program.queued * program.messages
        self._queues = [simpy.Store(self.env, room) for _ in range(program.shards)]
        self._network = simpy.Resource(self.env)
        self._published, self._added = self.env.event(), self.env.event()
        self._version, self._at_node = 0, [0] * program.nodes
        self._asked = simpy.Store(self.env)
        self._drawn = simpy.Store(self.env, 1)  # a batch that was drawn ahead
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

    def _stepping(self, steps: int) -> float:
        """Seconds of so many steps: the environments' own time is chance."""
        program = self._program
        count = steps * program.envs
        fixed, mean = steps * program.stepping - count * program.env_seconds, count * program.env_seconds
        if not mean or not program.spread:
            return fixed + mean
        shape = count / program.spread**2
        return fixed + self._chance.gammavariate(shape, mean / shape)

    def _actor(self, rank: int) -> Generator[Any, Any, None]:
        program, shard = self._program, rank % self._program.shards
        node = rank // program.actors_per_node
        yield self.env.timeout(self._chance.random() * program.unroll * program.stepping)
        while True:
            version = self._at_node[node]
            if program.service:
                version = self._version
                for _ in range(program.unroll):
                    yield from self._work(self._stepping(1))
                    yield self.env.timeout(program.costs.call)
                    answered = self.env.event()
                    yield self._asked.put(answered)
                    yield answered
            else:
                yield from self._work(self._stepping(program.unroll))
            with self._shards[shard].request(priority=1) as turn:
                yield turn
                yield from self._work(program.inserting)
            yield self._queues[shard].put(version)
            added, self._added = self._added, self.env.event()
            added.succeed()

    def _service(self) -> Generator[Any, Any, None]:
        program, most = self._program, max(1, self._program.rows // self._program.envs)
        while True:
            taken = [(yield self._asked.get())]
            while self._asked.items and len(taken) < most:
                taken.append((yield self._asked.get()))
            rows = len(taken) * program.envs
            yield from self._work(program.answering(rows))
            for answered in taken:
                answered.succeed()

    def _draws(self) -> Generator[Any, Any, None]:
        program, first = self._program, 0
        while True:
            order = [(first + i) % program.shards for i in range(program.shards)]
            shard = next((each for each in order if len(self._queues[each].items) >= program.messages), None)
            if shard is None:
                yield self._added
                continue
            first = shard + 1
            versions = []
            for _ in range(program.messages):
                versions.append((yield self._queues[shard].get()))
            with self._shards[shard].request(priority=0) as turn:
                yield turn
                yield from self._work(program.drawing)
            yield self.env.timeout(program.arriving)
            yield self._drawn.put(sum(versions) / len(versions))

    def _learner(self) -> Generator[Any, Any, None]:
        while True:
            version = yield self._drawn.get()
            yield from self._work(self._program.updating)
            self.steps += self._program.steps
            self.staleness.append(self._version - version)
            self._version += 1
            published, self._published = self._published, self.env.event()
            published.succeed()

    def _fetching(self, node: int) -> Generator[Any, Any, None]:
        """A node takes the newest version, whenever there is one: one fetch for all its actors."""
        program = self._program
        while True:
            if self._at_node[node] == self._version:
                yield self._published
            with self._network.request() as turn:
                yield turn
                version = self._version
                yield self.env.timeout(program.param_bytes / program.bandwidth)
            self._at_node[node] = version


# A network for images on the actors' cores, and 28 kB a step; the learner has a device that is as quick as before.
_FRAMES = functools.partial(Program, step_bytes=28_224.0, costs=Costs(step_env=155e-6))
PROGRAMS: dict[str, Callable[[int], Program]] = {
    "an environment of 1 ms": Program,
    "batches of 16 unrolls, not 64": functools.partial(Program, batch=16),
    "inference by a service": functools.partial(Program, service=True),
    "the same, 64 environments an actor": functools.partial(Program, service=True, envs=64, env_seconds=125e-6),
    "40 MB of parameters, not 40 kB": functools.partial(Program, param_bytes=40e6),
    "28 kB a step, one shard": _FRAMES,
    "the same, four shards, 100 Gbit/s": functools.partial(_FRAMES, shards=4, bandwidth=12.5e9),
}


def run(context: Context, say: Callable[[str], None] = print) -> list[Table]:
    """Simulates, and draws; see `benchmarks.runner`."""
    tables, curves = [], {}
    for name, make in PROGRAMS.items():
        say(name)
        most = ACTORS[: 4 if context.quick else None]
        curves[name] = [(make(actors), simulate(make(actors), long_enough(make(actors)))) for actors in most]
        rows = [Row(f"{program.actors} actors", seen.steps, None, _said(program)) for program, seen in curves[name]]
        tables.append(Table(f"{name}, simulated", "env steps/s", rows[-1], tuple(rows[:-1]), ratios=False))
    if not context.quick:
        draw(curves)
    return tables


def _said(program: Program) -> str:
    expected = model(program)
    return f"the model says {expected.steps:,.0f}, bound by {expected.bound_by}; staleness {expected.staleness:.1f}"


def long_enough(program: Program) -> float:
    """Seconds in which each actor has sent some unrolls, and the learner has made some updates."""
    per_second = model(program).steps
    everyone = 4 * program.actors * program.message / per_second
    return max(everyone, 20 * program.steps / per_second, 0.2 if program.service else 0.5)


def draw(curves: dict[str, list[tuple[Program, Outcome]]], path: pathlib.Path = IMAGE) -> None:
    """The modeled curves as lines, the simulated ones as points."""
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
