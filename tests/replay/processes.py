"""Real processes around a shared replay buffer, and experience that says by itself whether it is whole."""

from __future__ import annotations

import json
import pickle
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.errors import StoppedError
from rlframe.replay import SharedMemReplayBuffer
from rlframe.replay.shared_memory import block
from rlframe.testing.streams import fake_agent
from rlframe.types import FIRST, LAST, MID, AgentOutput, Step, StepSpec, TimeStep, Transition, global_env_ids, specs

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0  # seconds for whatever a test waits for
PIXELS = 400
STEP_SPEC = StepSpec(
    observation={"id": specs.Array((), np.int64), "image": specs.Array((PIXELS,), np.uint8)},
    action=specs.Array((3,), np.float32),
    extras={"log_prob": specs.Array((), np.float32)},
    agent_state=(specs.Array((2,), np.float32),),
)
EPISODE = 9  # timesteps
PER_ENV = 10**9


def first_id(rank: int, incarnation: int, env: Any) -> Any:
    """The id of the first timestep of an environment; the others follow."""
    return ((rank * 10 + incarnation) * 1000 + env) * PER_ENV


def place(ids: np.ndarray) -> np.ndarray:
    """The place of timesteps in their episodes. Environments begin at different ones."""
    return (ids + ids // PER_ENV) % EPISODE


def step_types(ids: np.ndarray) -> np.ndarray:
    return np.where(place(ids) == 0, FIRST, np.where(place(ids) == EPISODE - 1, LAST, MID)).astype(np.uint8)


def rewards(ids: np.ndarray) -> np.ndarray:
    return np.where(place(ids) == 0, 0, ids % 97 / 8).astype(np.float32)


def discounts(ids: np.ndarray) -> np.ndarray:
    return np.where((place(ids) == EPISODE - 1) & (ids % 2 == 0), 0, 1).astype(np.float32)


def observations(ids: np.ndarray) -> dict[str, np.ndarray]:
    return {"id": ids, "image": (ids[..., None] * 7 + np.arange(PIXELS)).astype(np.uint8)}


def actions(ids: np.ndarray) -> np.ndarray:
    return (ids[..., None] % 1000 + np.arange(3)).astype(np.float32)


def timestep(ids: np.ndarray) -> TimeStep:
    return TimeStep(step_types(ids), rewards(ids), discounts(ids), observations(ids))


def make_step(ids: np.ndarray) -> Step:
    """The step from the timesteps `ids` [B]; the version that acted is its number in its environment."""
    output = AgentOutput(actions(ids), {"log_prob": (ids % 1013).astype(np.float32)})
    state = (np.stack([ids % 11, ids % 13], axis=-1).astype(np.float32),)
    return Step(timestep(ids), output, state, ids % PER_ENV, timestep(ids + 1))


def expected_ids(item: Any, rank: int, incarnation: int, num_envs: int, steps: int) -> set[int]:
    """The first ids of all items of a writer that stepped all its environments `steps` times."""
    ids = first_id(rank, incarnation, np.arange(num_envs))[:, None] + np.arange(steps)
    if isinstance(item, Transition):
        ends = ids + np.minimum(item.n_step, EPISODE - 1 - place(ids))
        there = (step_types(ids) != LAST) & (ends % PER_ENV <= steps)
    else:
        start = ids % PER_ENV
        there = (start % item.period == 0) & (start + item.length <= steps)
    return set(ids[there].tolist())


def assert_whole(batch: Any, item: Any) -> np.ndarray:
    """Every field of every item is what its first id says. Returns the first ids [B]."""
    data = batch.data
    if isinstance(item, Transition):
        ids = data.observation["id"]
        m = np.minimum(item.n_step, EPISODE - 1 - place(ids))
        assert (step_types(ids) != LAST).all()
        reward = sum(np.where(k < m, item.discount**k * rewards(ids + k + 1), 0) for k in range(item.n_step))
        np.testing.assert_allclose(data.reward, reward, rtol=1e-5)
        np.testing.assert_allclose(data.discount, item.discount**m * discounts(ids + m), rtol=1e-5)
        np.testing.assert_array_equal(data.next_observation["id"], ids + m)
        np.testing.assert_array_equal(data.next_observation["image"], observations(ids + m)["image"])
        first, acted, seen = ids, ids, ids
    else:
        first = data.observation["id"][:, 0]
        seen = first[:, None] + np.arange(item.length + 1)
        acted = seen[:, :-1]
        np.testing.assert_array_equal(data.observation["id"], seen)
        np.testing.assert_array_equal(data.step_type, step_types(seen))
        np.testing.assert_array_equal(data.reward, rewards(seen[:, 1:]))
        np.testing.assert_array_equal(data.discount, discounts(seen[:, 1:]))
        np.testing.assert_array_equal(data.agent_state[0], np.stack([first % 11, first % 13], axis=-1))
    np.testing.assert_array_equal(data.observation["image"], observations(seen)["image"])
    np.testing.assert_array_equal(data.action, actions(acted))
    np.testing.assert_array_equal(data.extras["log_prob"], acted % 1013)
    np.testing.assert_array_equal(batch.keys[:, 0] * 10 + batch.keys[:, 1], first // PER_ENV // 1000)
    np.testing.assert_array_equal(batch.params_version, first % PER_ENV)
    return first


class Process:
    """A new interpreter that runs a function of this module on a pickled buffer and says things, a JSON per line."""

    def __init__(self, function: Any, buffer: Any, *args: Any):
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "tests.replay.processes"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self.popen.stdin is not None
        self.popen.stdin.write(pickle.dumps((function.__name__, buffer, args)))
        self.popen.stdin.flush()
        self._said: queue.Queue[Any] = queue.Queue()
        self._errors: list[bytes] = []
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._listen, self._keep_errors)]
        for thread in self._threads:
            thread.start()

    def hear(self) -> Any:
        """The next thing that it says; None once it has ended."""
        return self._said.get(timeout=DEADLINE)

    def tell(self, *thing: Any) -> None:
        """Says something to it, a JSON in a line."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(thing).encode() + b"\n")
        self.popen.stdin.flush()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(DEADLINE)

    def end(self) -> tuple[int, str]:
        """Waits for it to end: (exit code, what it wrote to stderr)."""
        code = self.popen.wait(DEADLINE)
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        for thread in self._threads:
            thread.join(DEADLINE)
        return code, b"".join(self._errors).decode()

    def _listen(self) -> None:
        assert self.popen.stdout is not None
        with self.popen.stdout as lines:
            for line in lines:
                self._said.put(json.loads(line))
        self._said.put(None)

    def _keep_errors(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as file:
            self._errors.append(file.read())


def say(thing: Any) -> None:
    print(json.dumps(thing), flush=True)


def write(buffer: Any, num_envs: int, steps: int, rank: int | None = None, subsets: bool = False) -> None:
    """A writer at full speed: says its rank and incarnation, writes, and says that it has."""
    rank, incarnation = buffer.claim_rank(rank=rank)
    buffer.open_segment(rank, num_envs)
    say([rank, incarnation])
    envs = np.arange(num_envs)
    ids = first_id(rank, incarnation, envs)
    for t in range(num_envs * steps if subsets else steps):
        some = (t + np.arange(1)) % num_envs if subsets else envs
        buffer.add(global_env_ids(rank, some), make_step(ids[some]))
        ids[some] += 1
    say("done")


def write_until_stopped(buffer: Any, num_envs: int) -> None:
    """Writes until it is killed, or the buffer is closed."""
    rank, incarnation = buffer.claim_rank(num_envs)
    ids = first_id(rank, incarnation, np.arange(num_envs))
    say([rank, incarnation])
    while not buffer.closed:
        buffer.add(global_env_ids(rank, np.arange(num_envs)), make_step(ids))
        ids += 1
    say("stopped")


def write_until_told(buffer: Any, num_envs: int) -> None:
    """Writes until it waits for room, and has another thread end that."""
    rank, incarnation = buffer.claim_rank(num_envs)
    ids = first_id(rank, incarnation, np.arange(num_envs))
    header = buffer._view().memory.headers[rank]

    def end() -> None:
        while not header[block.IS_WAITING]:
            time.sleep(0.01)
        buffer.end_waits(rank)

    threading.Thread(target=end, daemon=True).start()
    try:
        while True:
            buffer.add(global_env_ids(rank, np.arange(num_envs)), make_step(ids))
            ids += 1
    except StoppedError as error:
        say(str(error))


def make(_: Any) -> None:
    """Makes a queue, says its pickle, and stays."""
    agent = fake_agent("queue", Transition(1), 10, 100, STEP_SPEC)
    buffer = SharedMemReplayBuffer(agent, timeout=DEADLINE)
    say(pickle.dumps(buffer).hex())
    time.sleep(DEADLINE)


def claim(buffer: Any) -> None:
    """Claims a rank and keeps it."""
    say(buffer.claim_rank(2))
    time.sleep(DEADLINE)


def sample(buffer: Any, batches: int) -> None:
    """Says the first ids of some batches, and the probabilities of the last one, and stays."""
    for _ in range(batches):
        deadline = time.monotonic() + DEADLINE
        while (batch := buffer.wait_for_batch(1.0)) is None:
            assert time.monotonic() < deadline
        assert_whole(batch, buffer.spec.item)
        ids = batch.data.observation["id"]
        say(ids.tolist() if ids.ndim == 1 else ids[:, 0].tolist())
    say(batch.probabilities.tolist())
    time.sleep(DEADLINE)


def draw_when_told(buffer: Any) -> None:
    """Draws, releases and counts as it is told, and says what came of it."""
    for line in sys.stdin.buffer:
        what, *arguments = json.loads(line)
        if what == "draw":
            drawn = buffer.draw(*arguments)
            say(None if drawn is None else [drawn.keys.tolist(), drawn.probabilities.tolist()])
        elif what == "release":
            say(buffer.release(np.array(*arguments)))
        elif what in ("save", "restore"):
            say(getattr(buffer, what)(*arguments))
        else:
            say(buffer.stats())


def draw_until_killed(buffer: Any) -> None:
    """Draws, and releases all but the two draws before, without end; says the keys."""
    held = []
    while True:
        drawn = buffer.draw(timeout=0.2)
        if drawn is not None:
            say(drawn.keys.tolist())
            held.append(drawn.keys)
        if len(held) > 2 or (held and drawn is None):
            buffer.release(held.pop(0))


def read_dataset(buffer: Any) -> None:
    """Reads a dataset to its end."""
    with buffer.make_dataset() as dataset:
        say("reads")
        for _ in dataset:
            pass
    say("ended")


if __name__ == "__main__":
    _name, _buffer, _args = pickle.load(sys.stdin.buffer)
    globals()[_name](_buffer, *_args)
