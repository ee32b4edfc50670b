"""Save and restore a shared replay buffer.

Writers continue during a save, so they can overwrite rows while these rows are streamed to the file. Therefore the
segments' floors are saved last. Rows above the floor were not overwritten. Incomplete items exist only in the writers'
processes, and are not saved.
"""

from __future__ import annotations

import os

import numpy as np

from rlframe.errors import CheckpointError, UsageError
from rlframe.replay import replay_files, steps
from rlframe.replay.shared_memory import block
from rlframe.replay.shared_memory.block import BufferMemory
from rlframe.replay.shared_memory.sampler import Sampler
from rlframe.replay.shared_memory.segment_reader import NUMBER_MASK, RANK_BITS
from rlframe.replay.tables import PrioritizedTable
from rlframe.types import ReplaySpec


def save(path: str | os.PathLike[str], memory: BufferMemory, sampler: Sampler, spec: ReplaySpec) -> None:
    """Write the segments and the sampler's state to `path`, atomically.

    Raises:
        CheckpointError: the file could not be written. The old file is unchanged.
    """
    reader = sampler.reader
    reader.sync()
    table = reader.table
    described = {}
    arrays: dict[str, np.ndarray] = {}
    for rank, words in enumerate(memory.headers):
        if not words[block.SLOTS]:
            continue
        cursors, slots = reader.cursors[rank], words[block.SLOTS]
        described[rank] = [slots, words[block.CHUNK], words[block.NUM_CLAIMS], cursors]
        arrays.update(_rows(memory, rank, cursors.head, slots))
    arrays["numbers"] = table.starts()
    if isinstance(table, PrioritizedTable):
        arrays["leaves"] = table.leaves(arrays["numbers"])
    # `write` reads the headers last. The headers contain the floors, and rows above the floors are intact.
    arrays["headers"] = memory.header_words
    header = {
        "shared": [memory.num_writers, memory.token],
        "segments": described,
        "sampled": sampler.sampled,
        "evicted_unsampled": table.evicted_unsampled,
        "priorities": {name: getattr(table, name, 0) for name in ("highest", "dropped")},
        "rng": sampler.rng.bit_generator.state,
    }
    replay_files.write(path, spec, header, arrays)


def restore(path: str | os.PathLike[str], memory: BufferMemory, sampler: Sampler, spec: ReplaySpec) -> None:
    """Restore a file that `save` wrote. The caller must hold the claims lock.

    If this buffer has saved the file, or was already restored from it, the items in memory are newer than the file.
    Then only the priorities are restored.

    Raises:
        CheckpointError: the file is missing, damaged or from another agent, or writers have already added steps.
    """
    with replay_files.open_saved(path, spec) as saved:
        header, shapes = saved.header, saved.shapes
        num_writers, token = header.get("shared", (None, None))
        if num_writers != memory.num_writers:
            raise CheckpointError(
                f"{path} was saved by a replay buffer with num_writers={num_writers}, but this one has num_writers="
                f"{memory.num_writers}. (None means an in-process buffer.)"
            )
        is_same = token in (memory.token, memory.control[block.RESTORED_FROM])
        dtypes = {name: shapes[name] for name in ("numbers", "leaves", "headers") if name in shapes}
        made: dict[str, np.ndarray] = {name: np.empty(shape, dtype) for name, (dtype, shape) in dtypes.items()}
        arrays = dict(made)
        if not is_same:
            for rank, (slots, chunk, _, cursors) in header["segments"].items():
                _check_free(path, memory, int(rank), slots, chunk, spec)
                arrays.update(_rows(memory, int(rank), block.Cursors(*cursors).head, slots))
            saved.check_shapes(arrays)
        saved.read(arrays)
    starts = made["numbers"]
    if not is_same:
        memory.control[block.RESTORED_FROM] = header["shared"][1]
        for rank, (slots, chunk, claims, cursors) in header["segments"].items():
            floor = int(made["headers"][int(rank), block.FLOOR])
            there = starts[(starts >> RANK_BITS == int(rank))] & NUMBER_MASK
            _fill(memory, int(rank), slots, chunk, block.Cursors(*cursors), there[there >= floor], floor)
            words = memory.headers[int(rank)]
            words[block.NUM_CLAIMS] = max(claims, words[block.NUM_CLAIMS])
            words[block.NUM_RESTORES] += 1
        sampler.resume(starts, header["sampled"], header["rng"], header["evicted_unsampled"])
    table = sampler.reader.table
    if isinstance(table, PrioritizedTable):
        held = table.holds(starts)
        table.set_leaves(starts[held], made["leaves"][held])
        table.set_state({**table.state(), **header["priorities"]})
    sampler.publish(True)


def _rows(memory: BufferMemory, rank: int, head: int, slots: int) -> dict[str, np.ndarray]:
    """Return the used rows of a segment. The flags in `present` are not needed: `_fill` sets them."""
    rows = slice(rank * memory.rows, rank * memory.rows + min(head, slots))
    return {f"{rank}/{name}": array[rows] for name, array in memory.arrays.items() if name != "present"}


def _fill(
    memory: BufferMemory, rank: int, slots: int, chunk: int, cursors: block.Cursors, starts: np.ndarray, floor: int
) -> None:
    """Set the header, the log and the flags of a segment whose rows are restored. `starts` are its items' starts."""
    words, present = memory.headers[rank], memory.arrays["present"][rank * memory.rows :][:slots]
    present[:] = False
    present[starts % slots] = True
    memory.logs[rank][: len(starts)] = block.log_entries(starts)
    words[block.SLOTS], words[block.CHUNK], words[block.FLOOR] = slots, chunk, floor
    words[block.LOG_RESERVED] = len(starts)
    memory.cursors[rank].write(*cursors._replace(end=len(starts)))


def _check_free(
    path: str | os.PathLike[str], memory: BufferMemory, rank: int, slots: int, chunk: int, spec: ReplaySpec
) -> None:
    header = memory.headers[rank]
    if header[block.IN_USE] or memory.cursors_of(rank).head:
        raise CheckpointError(
            f"The replay buffer cannot be restored from {path}: writer {rank} has already added steps. "
            "Restore the buffer before writers add steps."
        )
    if slots > memory.rows:
        raise CheckpointError(f"{path} was saved with a larger max_envs: one of its segments has {slots} slots.")
    try:
        steps.check_room(spec, slots, (block.MARGIN_CHUNKS + 1) * chunk, header[block.NUM_ENVS])
    except UsageError as error:
        raise CheckpointError(f"{path} does not fit the writers of this buffer: {error}") from None
