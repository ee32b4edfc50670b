"""One consistent checkpoint of an inline run: learner, actor, and the replay where it is due.

The learner's checkpoint carries the actor's state and names the file of the replay, which is complete
before the checkpoint is written: a run that dies in between goes on from the checkpoint before.
"""

from __future__ import annotations

from rlframe.learners.checkpoints import Checkpointer
from rlframe.learners.replay_files import ReplayFiles
from rlframe.programs.assemble import CHECKPOINTS_KEPT, Parts
from rlframe.programs.experiment import Experiment
from rlframe.programs.run_dir import RunDir


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
    files, env_steps = _replay_files(directory), parts.actor.env_steps
    with_replay = with_replay or files.is_small(parts.replay_buffer)
    if with_replay:
        files.save(parts.replay_buffer, env_steps)
    extras = {
        "actor": parts.actor.get_state(with_envs=with_envs),
        "env_steps": env_steps,
        "incarnation": parts.actor.incarnation,
        "inferencer": parts.inferencer.get_state(),
        "replay": files.newest(),
    }
    parts.learner.save(extras, final=final)
    files.prune()
    return with_replay


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
    files = _replay_files(directory)
    files.drop_after(env_steps)
    saved_at, path = extras["replay"], files.find(extras["replay"])
    if path is not None and saved_at == env_steps and actor_state["env"] is not None:
        # The environments go on in mid-episode, and so do the fragments that they have open in the buffer.
        actor = parts.make_actor(described.seed)
        parts.replay_buffer.restore(path)
    else:
        # The same rank again, its next incarnation: open fragments are dropped, and seeds are new.
        if path is not None:
            parts.replay_buffer.restore(path)
        while parts.replay_buffer.claim_rank(rank=0)[1] < extras["incarnation"]:
            pass
        actor = parts.make_actor(described.seed, rank=0)
    actor.set_state(actor_state)
    return saved_at if path is not None else 0


def _replay_files(directory: RunDir) -> ReplayFiles:
    return ReplayFiles(directory.replay, CHECKPOINTS_KEPT)
