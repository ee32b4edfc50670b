"""One consistent checkpoint of an inline run: learner, actor, and the replay where it is due.

The learner's checkpoint carries the actor's state and names the file of the replay, which is complete
before the checkpoint is written: a run that dies in between goes on from the checkpoint before.
"""

from __future__ import annotations

import logging
import pathlib

from rlframe.learners.checkpoints import Checkpointer
from rlframe.programs.assemble import CHECKPOINTS_KEPT, Parts
from rlframe.programs.experiment import Experiment
from rlframe.programs.run_dir import RunDir

_log = logging.getLogger(__name__)

# A replay up to this size goes with every checkpoint: a resumed run is then exact, wherever it stopped.
_SMALL_REPLAY_BYTES = 64 * 2**20


def save(parts: Parts, directory: RunDir, *, with_envs: bool, with_replay: bool, final: bool) -> bool:
    """Writes a checkpoint of everything.

    Args:
        parts: the run.
        directory: of the run.
        with_envs: False where the environments have failed: a resumed run resets them.
        with_replay: whether a large replay is written too; without it the last one written counts.
        final: nothing follows in this session.

    Returns:
        Whether the replay was saved.

    Raises:
        CheckpointError: it could not be written; what was saved before is kept.
    """
    assert parts.actor is not None
    small = parts.replay_buffer.stats()["bytes"] <= _SMALL_REPLAY_BYTES
    if with_replay or small:
        directory.replay.mkdir(exist_ok=True)
        parts.replay_buffer.save(_path(directory, parts.actor.env_steps))
    extras = {
        "actor": parts.actor.get_state(with_envs=with_envs),
        "env_steps": parts.actor.env_steps,
        "incarnation": parts.actor.incarnation,
        "inferencer": parts.inferencer.get_state(),
        "replay": max(_saved(directory), default=None),
    }
    parts.learner.save(extras, final=final)
    # One large replay is kept: it may well be as large as the memory.
    for env_steps in sorted(_saved(directory))[: -CHECKPOINTS_KEPT if small else -1]:
        _path(directory, env_steps).unlink(missing_ok=True)
    return small or with_replay


def exists(directory: RunDir) -> bool:
    """Whether there is a checkpoint to restore."""
    return bool(Checkpointer(directory.checkpoints).steps())


def restore(parts: Parts, described: Experiment, directory: RunDir) -> int:
    """Takes over the latest checkpoint, and makes the Actor.

    Returns:
        The environment steps at which the replay was saved; 0 where there is none, and learning waits
        until it has filled again.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    extras = parts.learner.restore()
    parts.inferencer.set_state(extras["inferencer"])
    env_steps, actor_state = extras["env_steps"], extras["actor"]
    for later in (saved for saved in _saved(directory) if saved > env_steps):
        _path(directory, later).unlink()  # of a checkpoint that was never completed, or was removed
    saved_at = extras["replay"] if extras["replay"] in _saved(directory) else None
    if saved_at is None and extras["replay"] is not None:
        _log.warning(
            "The replay of this checkpoint (%s) is no longer there: learning waits until the buffer has filled again.",
            _path(directory, extras["replay"]),
        )
    if saved_at == env_steps and actor_state["env"] is not None:
        # The environments go on in mid-episode, and so do the fragments that they have open in the buffer.
        actor = parts.make_actor(described.seed)
        parts.replay_buffer.restore(_path(directory, saved_at))
    else:
        # The same rank again, its next incarnation: open fragments are dropped, and seeds are new.
        if saved_at is not None:
            parts.replay_buffer.restore(_path(directory, saved_at))
        while parts.replay_buffer.claim_rank(rank=0)[1] < extras["incarnation"]:
            pass
        actor = parts.make_actor(described.seed, rank=0)
    actor.set_state(actor_state)
    return saved_at or 0


def _path(directory: RunDir, env_steps: int) -> pathlib.Path:
    return directory.replay / str(env_steps)


def _saved(directory: RunDir) -> list[int]:
    """The environment steps of the replays that are there, complete."""
    return [int(path.name) for path in directory.replay.glob("*") if path.name.isdigit()]
