"""Tests that frame-stacked pixels are read exactly as they were written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlframe.errors import UsageError
from rlframe.replay import ReplayBuffer
from rlframe.testing.streams import STEP_SPEC, fake_agent
from rlframe.types import (
    FIRST,
    LAST,
    MID,
    AgentOutput,
    Sequence,
    Step,
    StepSpec,
    TimeStep,
    Transition,
    global_env_ids,
    specs,
)

SHAPE = (4, 32, 36)


class FrameStream:
    """Environments that stack frames. The pixels [-1, 0, 0:4] of a stack contain its number."""

    def __init__(
        self,
        rng: np.random.Generator,
        num_envs: int,
        shape: Any = SHAPE,
        first: str = "mixed",
        stacked: bool = True,
    ):
        self.rng, self.num_envs, self.shape, self.first, self.stacked = rng, num_envs, shape, first, stacked
        self.stacks: dict[int, np.ndarray] = {}
        self.count = 0
        self.types = np.full(num_envs, FIRST)
        self.open = np.stack([self.stack(None, FIRST) for _ in range(num_envs)])

    def stack(self, before: np.ndarray | None, step_type: int) -> np.ndarray:
        """Return the next stack of an environment after the stack `before`."""
        new = self.rng.integers(0, 255, self.shape).astype(np.uint8)
        new[-1, 0, :4] = np.frombuffer(np.uint32(self.count).tobytes(), np.uint8)
        if step_type != FIRST and self.stacked:
            new[:-1] = before[1:]
        elif step_type == FIRST and self.first != "random":
            kinds = ("zeros", "repeated", "random", "kept")
            kind = self.first if self.first != "mixed" else kinds[self.rng.integers(4)]
            if kind == "zeros":
                new[:-1] = 0
            elif kind == "repeated":
                new[:-1] = new[-1]
            elif kind == "kept" and before is not None:
                new[:-1] = before[1:]
        self.stacks[self.count] = new.copy()
        self.count += 1
        return new

    def step(self, envs: np.ndarray | None = None) -> tuple[np.ndarray, Step]:
        """Step the environments `envs` (None: all), and return the arguments of `add`."""
        envs = np.arange(self.num_envs) if envs is None else envs
        count = len(envs)
        types = np.where(self.rng.random(count) < 0.1, LAST, MID).astype(np.uint8)
        types = np.where(self.types[envs] == LAST, FIRST, types).astype(np.uint8)
        after = np.stack([self.stack(self.open[env], step_type) for env, step_type in zip(envs, types)])
        ones, zeros = np.ones(count, np.float32), np.zeros(count, np.float32)
        step = Step(
            TimeStep(self.types[envs], zeros, ones, self.open[envs]),
            AgentOutput(np.zeros(count, np.int32), {"log_prob": zeros}),
            (),
            0,
            TimeStep(types, zeros, ones, after),
        )
        self.open[envs], self.types[envs] = after, types
        return global_env_ids(0, envs), step

    def assert_exact(self, stacks: np.ndarray) -> None:
        """Check that each of `stacks` [..., k, H, W] equals the written stack with the same number."""
        for stack in stacks.reshape(-1, *self.shape):
            number = int(np.frombuffer(stack[-1, 0, :4].tobytes(), np.uint32)[0])
            np.testing.assert_array_equal(stack, self.stacks[number])


def pixel_agent(item: Any, capacity: int = 300, shape: Any = SHAPE) -> Any:
    spec = StepSpec(specs.Array(shape, np.uint8), STEP_SPEC.action, STEP_SPEC.extras, ())
    return fake_agent("uniform", item, 16, capacity, spec)


@pytest.mark.parametrize("subsets", [pytest.param(False, marks=pytest.mark.system), True], ids=["lockstep", "subsets"])
@pytest.mark.parametrize("first", ["zeros", "repeated", "random", "kept", "mixed"])
@pytest.mark.parametrize("item", [Transition(1), Transition(3), Sequence(5, 3)], ids=str)
def test_stacks_are_read_exactly_as_they_were_written(item: Any, first: str, subsets: bool) -> None:
    rng = np.random.default_rng(1)
    stream, buffer = FrameStream(rng, 4, first=first), ReplayBuffer(pixel_agent(item, 150))
    buffer.claim_rank(4)
    for t in range(150):
        # One environment is slow, so its frames must be kept longer than the frames of other environments.
        envs = np.array([0, 2, 3, 1][: 1 + t % 3]) if subsets and t % 17 else None
        buffer.add(*stream.step(envs))
        batch = buffer.sample()
        if batch is not None and t % 3 == 0:
            stream.assert_exact(batch.data.observation)
            if isinstance(item, Transition):
                stream.assert_exact(batch.data.next_observation)
    assert buffer._store.observations.single_frame_leaves() == ["observation"]
    assert buffer.stats()["evicted"] > 0


def test_single_frames_take_a_quarter_of_the_memory() -> None:
    agent = pixel_agent(Transition(1), 10_000, (4, 84, 84))
    sizes = []
    for single_frame in (True, False):
        buffer = ReplayBuffer(agent, single_frame=single_frame)
        buffer.claim_rank(8)
        sizes.append(buffer.stats()["bytes"])
    assert sizes[0] < 0.26 * sizes[1]


def test_frames_of_many_writers_are_stored_once() -> None:
    """With many writers, the timesteps of one environment are far apart."""
    shape, num_writers = (4, 32, 32), 8
    buffer, rng = ReplayBuffer(pixel_agent(Transition(1), 20_000, shape)), np.random.default_rng(0)
    streams = [FrameStream(rng, 2, shape, first="repeated") for _ in range(num_writers)]
    for _ in streams:
        buffer.claim_rank(2)
    for _ in range(60):
        for rank, stream in enumerate(streams):
            _, step = stream.step()
            buffer.add(global_env_ids(rank, np.arange(2)), step)
    (store,) = buffer._store.observations._frames.values()
    assert store.rows_stored_separately < 0.2 * store.rows_seen
    frames = len(store._separate_frames)
    assert store.nbytes >= (buffer._store.timeline.slots + frames) * 32 * 32


def test_images_that_are_not_stacked_are_stored_as_whole_rows() -> None:
    stream, buffer = FrameStream(np.random.default_rng(0), 4, stacked=False), ReplayBuffer(pixel_agent(Transition(1)))
    buffer.claim_rank(4)
    for _ in range(150):
        buffer.add(*stream.step())
        if (batch := buffer.sample()) is not None:
            stream.assert_exact(batch.data.observation)
            stream.assert_exact(batch.data.next_observation)
    assert buffer._store.observations.single_frame_leaves() == []
    whole = ReplayBuffer(pixel_agent(Transition(1)), single_frame=False)
    whole.claim_rank(4)
    assert buffer.stats()["bytes"] == whole.stats()["bytes"]


def test_single_frame_option_is_refused_for_images_that_are_not_stacked() -> None:
    stream = FrameStream(np.random.default_rng(0), 4, stacked=False)
    buffer = ReplayBuffer(pixel_agent(Transition(1)), single_frame=True)
    buffer.claim_rank(4)
    with pytest.raises(UsageError, match="single_frame"):
        for _ in range(150):
            buffer.add(*stream.step())


def test_separate_frames_are_dropped_when_their_steps_are_evicted() -> None:
    stream = FrameStream(np.random.default_rng(0), 4, first="random")
    buffer = ReplayBuffer(pixel_agent(Transition(1), 100))
    buffer.claim_rank(4)
    store = buffer._store.observations._frames[0]
    store._sweep_at = 16
    for _ in range(400):
        buffer.add(*stream.step())
        store._sweep_at = min(store._sweep_at, 64)
    assert store._next_separate > 300
    assert len(store._separate_frames) < 150
    stream.assert_exact(buffer.sample().data.observation)
