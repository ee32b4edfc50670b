"""Helpers for tests of the queue."""

from __future__ import annotations

from rlframe.trajectories.queue.queue import Queue

SETTINGS = {
    "wandb_group": "group",
    "wandb_project": "project",
    "batch_size": 8,
    "max_token_len": 512,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 10,
    "starting_step": 0,
    "num_steps": 1000,
}


def started(**settings) -> Queue:
    """Return a queue whose trainer has registered and requested a batch."""
    queue = Queue()
    queue.register({**SETTINGS, **settings}, "uuid", 0.0)
    queue.note_trainer()
    return queue


def join(queue, group_size=4, *, weight=1.0, minimum=None, name="env", length=100, resume=None, token=None, now=0.0):
    return queue.register_env(name, length, weight, group_size, minimum, resume, token, now)


def add(queue, sequences, tokens, size_bytes, env_id, version, key, now):
    """Add a group with the next free group id to the queue."""
    return queue.add(queue.next_group, sequences, tokens, size_bytes, env_id, version, key, now)


def send(queue, *sizes, env_id=None, version=None, key=None, now=0.0):
    """Add one group for each size (number of sequences). Return the ids of the groups."""
    return [add(queue, size, 10 * size, 100, env_id, version, key, now).group_id for size in sizes]


def batch_of(queue, now=0.0, **options):
    batch = queue.take(now, **options)
    return batch and list(batch.group_ids)
