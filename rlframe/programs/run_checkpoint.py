"""One consistent checkpoint of an inline run: learner, actor, and the replay where it is due.

The learner's checkpoint carries the rest, so that they are saved together or not at all. A replay
that is large is a file of its own, written before the checkpoint that names it.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
from collections.abc import Iterator
from typing import Any

from rlframe.errors import CheckpointError
from rlframe.programs.assemble import Parts
from rlframe.programs.experiment import Experiment
from rlframe.programs.run_dir import RunDir

# A replay up to this size goes into every checkpoint: a resumed run is then exact, wherever it stopped.
_SMALL_REPLAY_BYTES = 64 * 2**20


def save(parts: Parts, directory: RunDir, *, with_actor: bool, with_replay: bool, final: bool) -> bool:
    """Writes a checkpoint of everything.

    Args:
        parts: the run.
        directory: of the run.
        with_actor: False where the environments have failed: a resumed run resets them.
        with_replay: whether a large replay is written too; without it the last one written counts.
        final: nothing follows in this session.

    Returns:
        Whether the replay was saved.

    Raises:
        CheckpointError: it could not be written; what was saved before is kept.
    """
    assert parts.actor is not None
    small = parts.replay_buffer.stats()["bytes"] <= _SMALL_REPLAY_BYTES
    path = None
    if with_replay and not small:
        path = _write_replay(parts.replay_buffer, directory.replay, parts.actor.env_steps)
    extras = {
        "actor": parts.actor.get_state() if with_actor else None,
        "env_steps": parts.actor.env_steps,
        "inferencer": parts.inferencer.get_state(),
        "replay": parts.replay_buffer.get_state() if small and hasattr(parts.replay_buffer, "get_state") else None,
    }
    parts.learner.save(extras, final=final)
    if path is not None:
        _remove_others(path)
    return small or path is not None


def restore(parts: Parts, described: Experiment, directory: RunDir) -> int:
    """Takes over the latest checkpoint, and makes the Actor.

    Returns:
        The environment steps at which the replay was saved.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    extras = parts.learner.restore()
    parts.inferencer.set_state(extras["inferencer"])
    replay, saved_at = extras["replay"], extras["env_steps"]
    if replay is None:
        replay, saved_at = _read_replay(directory.replay, extras["env_steps"])
    actor = extras["actor"]
    exact = actor is not None and actor["env"] is not None and replay is not None and saved_at == extras["env_steps"]
    if exact:
        # The environments go on in mid-episode, and so do the fragments that they have open in the buffer.
        made = parts.make_actor(described.seed)
        parts.replay_buffer.set_state(replay)
    else:
        # The same rank again, its next incarnation: open fragments are dropped, and seeds are new.
        if replay is not None:
            parts.replay_buffer.set_state(replay)
        made = parts.make_actor(described.seed, rank=0)
    if actor is not None:
        made.set_state(actor)
    return saved_at


def _write_replay(replay_buffer: Any, folder: pathlib.Path, env_steps: int) -> pathlib.Path:
    path = folder / f"{env_steps}.pickle"
    with _explain("write", path):
        folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "wb") as file:
                pickle.dump(replay_buffer.get_state(), file, protocol=5)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


def _read_replay(folder: pathlib.Path, env_steps: int) -> tuple[Any, int]:
    """(the newest replay that is not newer than the checkpoint, its environment steps), or (None, 0)."""
    found = sorted(int(path.stem) for path in folder.glob("*.pickle") if path.stem.isdigit())
    found = [saved_at for saved_at in found if saved_at <= env_steps]
    if not found:
        return None, 0
    path = folder / f"{found[-1]}.pickle"
    with _explain("read", path), open(path, "rb") as file:
        return pickle.load(file), found[-1]


def _remove_others(path: pathlib.Path) -> None:
    for other in path.parent.glob("*.pickle"):
        if other != path:
            other.unlink(missing_ok=True)


@contextlib.contextmanager
def _explain(what: str, path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        hint = "Free some space, then --resume." if what == "write" else "Remove it to go on with an empty replay."
        raise CheckpointError(f"Cannot {what} the replay {path}: {reason}. {hint}") from error
