"""Processes that use a shared replay buffer. Tests can check a step's data, because its id determines the data."""

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
DEADLINE = 60.0  # maximum number of seconds that a test waits for one event
PIXELS = 400
STEP_SPEC = StepSpec(
    observation={"id": specs.Array((), np.int64), "image": specs.Array((PIXELS,), np.uint8)},
    action=specs.Array((3,), np.float32),
    extras={"log_prob": specs.Array((), np.float32)},
    agent_state=(specs.Array((2,), np.float32),),
)
EPISODE = 9  # number of timesteps in an episode
PER_ENV = 10**9


def first_id(rank: int, incarnation: int, env: Any) -> Any:
    """Return the id of an environment's first timestep. Each later timestep has the next id."""
    return ((rank * 10 + incarnation) * 1000 + env) * PER_ENV


def place_in_episode(ids: np.ndarray) -> np.ndarray:
    """Return the positions of timesteps in their episodes. Environments begin at different positions."""
    return (ids + ids // PER_ENV) % EPISODE


def step_types(ids: np.ndarray) -> np.ndarray:
    return np.where(
        place_in_episode(ids) == 0, FIRST, np.where(place_in_episode(ids) == EPISODE - 1, LAST, MID)
    ).astype(np.uint8)


def rewards(ids: np.ndarray) -> np.ndarray:
    return np.where(place_in_episode(ids) == 0, 0, ids % 97 / 8).astype(np.float32)


def discounts(ids: np.ndarray) -> np.ndarray:
    return np.where((place_in_episode(ids) == EPISODE - 1) & (ids % 2 == 0), 0, 1).astype(np.float32)


def observations(ids: np.ndarray) -> dict[str, np.ndarray]:
    return {"id": ids, "image": (ids[..., None] * 7 + np.arange(PIXELS)).astype(np.uint8)}


def actions(ids: np.ndarray) -> np.ndarray:
    return (ids[..., None] % 1000 + np.arange(3)).astype(np.float32)


def timestep(ids: np.ndarray) -> TimeStep:
    return TimeStep(step_types(ids), rewards(ids), discounts(ids), observations(ids))


def make_step(ids: np.ndarray) -> Step:
    """Return the step that begins at the timesteps `ids` [B].

    The params version of a step is the number of its timestep, counted per environment.
    """
    output = AgentOutput(actions(ids), {"log_prob": (ids % 1013).astype(np.float32)})
    state = (np.stack([ids % 11, ids % 13], axis=-1).astype(np.float32),)
    return Step(timestep(ids), output, state, ids % PER_ENV, timestep(ids + 1))


def expected_ids(item: Any, rank: int, incarnation: int, num_envs: int, steps: int) -> set[int]:
    """Return the ids at which items start, for a writer that has stepped all its environments `steps` times."""
    ids = first_id(rank, incarnation, np.arange(num_envs))[:, None] + np.arange(steps)
    if isinstance(item, Transition):
        ends = ids + np.minimum(item.n_step, EPISODE - 1 - place_in_episode(ids))
        there = (step_types(ids) != LAST) & (ends % PER_ENV <= steps)
    else:
        start = ids % PER_ENV
        there = (start % item.period == 0) & (start + item.length <= steps)
    return set(ids[there].tolist())


def assert_whole(batch: Any, item: Any) -> np.ndarray:
    """Check that all fields of each item fit the id of its first timestep. Return these ids, [B]."""
    data = batch.data
    if isinstance(item, Transition):
        ids = data.observation["id"]
        m = np.minimum(item.n_step, EPISODE - 1 - place_in_episode(ids))
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
    """A new Python process. It runs a function of this module with a pickled buffer, and prints JSON lines."""

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
        self._lines: queue.Queue[Any] = queue.Queue()
        self._errors: list[bytes] = []
        self._threads = [threading.Thread(target=read, daemon=True) for read in (self._listen, self._keep_errors)]
        for thread in self._threads:
            thread.start()

    def read_line(self) -> Any:
        """Return the next line that the process prints, or None if the process has ended."""
        return self._lines.get(timeout=DEADLINE)

    def send_line(self, *thing: Any) -> None:
        """Send a JSON line to the process."""
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(thing).encode() + b"\n")
        self.popen.stdin.flush()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait(DEADLINE)

    def end(self) -> tuple[int, str]:
        """Wait until the process exits. Return (exit code, stderr)."""
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
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def _keep_errors(self) -> None:
        assert self.popen.stderr is not None
        with self.popen.stderr as file:
            self._errors.append(file.read())


def print_line(thing: Any) -> None:
    print(json.dumps(thing), flush=True)


def write(buffer: Any, num_envs: int, steps: int, rank: int | None = None, subsets: bool = False) -> None:
    """Print the rank and incarnation, write steps at full speed, and print "done"."""
    rank, incarnation = buffer.claim_rank(rank=rank)
    buffer.open_segment(rank, num_envs)
    print_line([rank, incarnation])
    envs = np.arange(num_envs)
    ids = first_id(rank, incarnation, envs)
    for t in range(num_envs * steps if subsets else steps):
        some = (t + np.arange(1)) % num_envs if subsets else envs
        buffer.add(global_env_ids(rank, some), make_step(ids[some]))
        ids[some] += 1
    print_line("done")


def write_until_stopped(buffer: Any, num_envs: int) -> None:
    """Write steps until the process is killed or the buffer is closed."""
    rank, incarnation = buffer.claim_rank(num_envs)
    ids = first_id(rank, incarnation, np.arange(num_envs))
    print_line([rank, incarnation])
    while not buffer.closed:
        buffer.add(global_env_ids(rank, np.arange(num_envs)), make_step(ids))
        ids += 1
    print_line("stopped")


def write_until_end_waits(buffer: Any, num_envs: int) -> None:
    """Write steps until the writer waits for free slots. Then another thread calls `end_waits`."""
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
        print_line(str(error))


def make(_: Any) -> None:
    """Create a queue, print its pickle, and keep running."""
    agent = fake_agent("queue", Transition(1), 10, 100, STEP_SPEC)
    buffer = SharedMemReplayBuffer(agent, timeout=DEADLINE)
    print_line(pickle.dumps(buffer).hex())
    time.sleep(DEADLINE)


def claim(buffer: Any) -> None:
    """Claim a rank, and hold it until the process exits."""
    print_line(buffer.claim_rank(2))
    time.sleep(DEADLINE)


def sample(buffer: Any, batches: int) -> None:
    """Sample batches. Print the first ids of each batch, and the probabilities of the last batch. Keep running."""
    for _ in range(batches):
        deadline = time.monotonic() + DEADLINE
        while (batch := buffer.wait_for_batch(1.0)) is None:
            assert time.monotonic() < deadline
        assert_whole(batch, buffer.spec.item)
        ids = batch.data.observation["id"]
        print_line(ids.tolist() if ids.ndim == 1 else ids[:, 0].tolist())
    print_line(batch.probabilities.tolist())
    time.sleep(DEADLINE)


def draw_on_request(buffer: Any) -> None:
    """Answer the requests on stdin, one per line: draw, release, save, restore or stats. Print each result."""
    for line in sys.stdin.buffer:
        what, *arguments = json.loads(line)
        if what == "draw":
            drawn = buffer.draw(*arguments)
            print_line(None if drawn is None else [drawn.keys.tolist(), drawn.probabilities.tolist()])
        elif what == "release":
            print_line(buffer.release(np.array(*arguments)))
        elif what in ("save", "restore"):
            print_line(getattr(buffer, what)(*arguments))
        else:
            print_line(buffer.stats())


def draw_until_killed(buffer: Any) -> None:
    """Draw batches forever, and print their keys. Release each batch after two further draws."""
    held = []
    while True:
        drawn = buffer.draw(timeout=0.2)
        if drawn is not None:
            print_line(drawn.keys.tolist())
            held.append(drawn.keys)
        if len(held) > 2 or (held and drawn is None):
            buffer.release(held.pop(0))


def read_dataset(buffer: Any) -> None:
    """Read a dataset until it ends."""
    with buffer.make_dataset() as dataset:
        print_line("reads")
        for _ in dataset:
            pass
    print_line("ended")


if __name__ == "__main__":
    _name, _buffer, _args = pickle.load(sys.stdin.buffer)
    globals()[_name](_buffer, *_args)
