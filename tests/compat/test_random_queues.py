"""Send 300 random sequences of requests to atroposlib's server and to our queue, and compare the answers.

tests/design/README.md lists the known differences.

`make test-compat` installs atroposlib.
"""

from __future__ import annotations

import json
import random
import subprocess
from typing import Any

import pytest

from rlframe.trajectories.queue.queue import Queue
from tests.compat.test_published_environments import PYTHON
from tests.trajectories.queues import SETTINGS, add, join
from tests.trajectories.serving import ROOT

pytestmark = pytest.mark.compat

KINDS = ("one size", "undersized groups", "minimum shares", "mixed sizes")
PER_KIND = 75


def random_queue(kind: str, seed: int) -> dict[str, Any]:
    """Return a random sequence of registrations, groups and batch requests. `mark` is the number of a group."""
    source = random.Random(f"{kind} {seed}")
    size = source.choice([1, 2, 3, 4])
    batch_size = source.choice([4, 8, 12, 16])
    events: list[list[Any]] = []
    envs: list[int] = []  # group size of each environment
    mark = 0
    for _ in range(source.randrange(1, 4)):
        envs.append(size if kind != "mixed sizes" else source.choice([1, 2, 4]))
        events.append(["join", envs[-1], shares(source, kind, size, batch_size)])
    for _ in range(source.randrange(10, 60)):
        what = source.random()
        if what < 0.1:
            events.append(["drain"])
        elif what < 0.13:
            events.append(["leave", source.randrange(len(envs))])
        else:
            sender = source.choice([*range(len(envs)), *([None] if kind in ("one size", "mixed sizes") else [])])
            sent = size if sender is None else envs[sender]
            if kind == "undersized groups":
                sent = source.randrange(1, sent + 1)
            events.append(["send", mark, sender, sent])
            mark += 1
    return {"batch_size": batch_size, "events": [*events, ["drain"]]}


def shares(source: random.Random, kind: str, size: int, batch_size: int) -> float | None:
    """Return a random minimum share of a batch, so small that three environments with this share fit into a batch."""
    fitting = [
        minimum for minimum in (0.1, 0.25, 0.3) if -(-int(batch_size * minimum) // size) * size * 3 <= batch_size
    ]
    return source.choice([None, *fitting]) if kind == "minimum shares" else None


def play(queue: dict[str, Any]) -> list[Any]:
    """Send the events to our `Queue`. Return its answers in the format of `published_queues.play`."""
    ours = Queue()
    ours.register({**SETTINGS, "batch_size": queue["batch_size"]}, "uuid", 0.0)
    ours.note_trainer()
    return [PLAYED[what](ours, *how) for what, *how in queue["events"]]


def send(ours: Queue, mark: int, env_id: int | None, size: int) -> list[Any]:
    answer = add(ours, size, size, 1, env_id, None, None, 0.0)
    assert answer.group_id == mark
    return [answer.status, answer.buffer_size or 0]


def drain(ours: Queue) -> list[Any]:
    batches = []
    while (batch := ours.take(0.0)) is not None:
        batches.append(list(batch.group_ids))
    status = ours.status()
    return [batches, status.current_step, status.queue_size]


PLAYED = {
    "join": lambda ours, size, minimum: join(ours, size, minimum=minimum).env_id,
    "leave": lambda ours, env_id: "success" if ours.disconnect_env(env_id) else "failure",
    "send": send,
    "drain": drain,
}


@pytest.fixture(scope="module")
def published() -> dict[str, list[tuple[dict[str, Any], list[Any]]]]:
    """Return kind -> list of (event sequence, answers of atroposlib's server)."""
    if not PYTHON.exists():
        pytest.skip("atroposlib is not installed: `make test-compat` installs it")
    queues = [random_queue(kind, seed) for kind in KINDS for seed in range(PER_KIND)]
    command = [str(PYTHON), str(ROOT / "tests/compat/published_queues.py")]
    done = subprocess.run(command, input=json.dumps(queues), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-5000:]
    played = list(zip(queues, json.loads(done.stdout.splitlines()[-1])))
    return {kind: played[i * PER_KIND : (i + 1) * PER_KIND] for i, kind in enumerate(KINDS)}


def in_any_order(answer: Any) -> Any:
    """Sort the groups in each batch of a "drain" answer. atroposlib's server does not keep the order of groups."""
    return (
        [[sorted(batch) for batch in answer[0]], *answer[1:]]
        if isinstance(answer, list) and len(answer) == 3
        else answer
    )


@pytest.mark.parametrize("kind", ["one size", "minimum shares"])
def test_groups_of_one_size_form_the_same_batches_on_the_server_of_atroposlib(published, kind):
    """The queue and the server return equal batches in equal order, equal steps, and equal answers to each group."""
    formed = 0
    for queue, theirs in published[kind]:
        ours = play(queue)
        assert list(map(in_any_order, ours)) == list(map(in_any_order, theirs)), queue
        formed += ours[-1][1]
    assert formed > 100


def test_undersized_groups_wait_in_a_buffer_like_on_the_server_of_atroposlib(published):
    """Small groups wait until they fill a whole group. Later, atroposlib's server splits such a group; our queue keeps
    it whole.
    """
    buffered = 0
    for queue, theirs in published["undersized groups"]:
        ours = play(queue)
        answers = [i for i, (what, *_) in enumerate(queue["events"]) if what == "send"]
        assert [ours[i] for i in answers] == [theirs[i] for i in answers], queue
        sizes = {mark: size for what, *rest in queue["events"] if what == "send" for mark, _, size in [rest]}
        drains = [ours[i] for i, (what, *_) in enumerate(queue["events"]) if what == "drain"]
        for batch in (batch for drained in drains for batch in drained[0]):
            assert sum(sizes[mark] for mark in batch) == queue["batch_size"]
        buffered += sum(ours[i][1] > 0 for i in answers)
    assert buffered > 500


def test_batches_of_mixed_group_sizes_are_ready_no_later_than_on_the_server_of_atroposlib(published):
    """The groups of each environment stay in order. Our queue fills a batch with the oldest groups that fit exactly.
    atroposlib's server first packs the groups into units of the largest group size.
    """
    earlier = 0
    for queue, theirs in published["mixed sizes"]:
        sent = {
            mark: (env_id, size) for what, *rest in queue["events"] if what == "send" for mark, env_id, size in [rest]
        }
        steps = []
        for answers in (play(queue), theirs):
            drains = [answer for answer in answers if isinstance(answer, list) and len(answer) == 3]
            batches = [batch for drained in drains for batch in drained[0]]
            assert all(sum(sent[mark][1] for mark in batch) == queue["batch_size"] for batch in batches)
            for sender in set(sent.values()):
                marks = [mark for batch in batches for mark in sorted(batch) if sent[mark] == sender]
                assert marks == sorted(marks)
            steps.append([drained[1] for drained in drains])
        assert all(here >= there for here, there in zip(*steps)), queue
        earlier += sum(here > there for here, there in zip(*steps))
    assert earlier > 10


def test_group_larger_than_batch_does_not_block_the_queue(published):
    ours = Queue()
    ours.register({**SETTINGS, "batch_size": 4}, "uuid", 0.0)
    assert add(ours, 5, 5, 1, None, None, None, 0.0).too_large
    add(ours, 4, 4, 1, None, None, None, 0.0)
    assert drain(ours)[1:] == [1, 0]
    queue = {"batch_size": 4, "events": [["send", 0, None, 5], ["send", 1, None, 4], ["drain"]]}
    command = [str(PYTHON), str(ROOT / "tests/compat/published_queues.py")]
    done = subprocess.run(command, input=json.dumps([queue]), capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1])[0][-1] == [[], 0, 2]
