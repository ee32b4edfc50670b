"""Test arrays in shared memory: their layout, opening the memory, and reading while another process writes."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import threading

import numpy as np
import pytest

from rlframe.interprocess.memory import MACHINE, MemoryName, Seqlock, SharedArrays, anonymous_file
from rlframe.interprocess.waiting import Futex

DEADLINE = 60.0
LABEL = "rlframe-test"
FIELDS = {
    "words": ((1 + 2 * 3,), np.dtype(np.int64)),
    "flags": ((5,), np.dtype(bool)),
    "nothing": ((0, 4), np.dtype(np.float32)),
    "pixels": ((3, 64, 64), np.dtype(np.uint8)),
}


def test_arrays_share_no_cache_line_and_large_arrays_share_no_page():
    shared = SharedArrays.create(LABEL, FIELDS)
    start = min(array.ctypes.data for array in shared.arrays.values()) // mmap.PAGESIZE * mmap.PAGESIZE
    places = {name: array.ctypes.data - start for name, array in shared.arrays.items()}
    assert all(place % 64 == 0 for place in places.values())
    assert len(set(places.values())) == len(FIELDS) and min(places.values()) == 64
    assert places["pixels"] % mmap.PAGESIZE == 0
    for name, (shape, dtype) in FIELDS.items():
        assert (shared.arrays[name].shape, shared.arrays[name].dtype) == (shape, dtype)
        assert not shared.arrays[name].any()


def test_attached_memory_shows_writes_and_that_it_was_closed():
    created = SharedArrays.create(LABEL, FIELDS)
    attached = SharedArrays.attach(created.name, LABEL, FIELDS)
    created.arrays["pixels"][1] = 7
    assert attached.arrays["pixels"].sum() == 7 * 64 * 64
    assert not attached.closed and attached.creator_is_alive
    created.close()
    created.close()
    assert attached.closed
    assert attached.arrays["pixels"][1, 0, 0] == 7  # the closed memory is still readable through `attached`
    with pytest.raises(FileNotFoundError):
        SharedArrays.attach(created.name, LABEL, FIELDS)


def test_unreferenced_memory_is_closed_and_leaves_no_descriptor():
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    created = SharedArrays.create(LABEL, FIELDS)
    attached = SharedArrays.attach(created.name, LABEL, FIELDS)
    assert len(os.listdir("/proc/self/fd")) > before
    del created
    gc.collect()
    assert attached.closed
    del attached
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_attach_refuses_memory_with_a_different_name_or_layout():
    created = SharedArrays.create(LABEL, FIELDS)
    name: MemoryName = created.name
    larger = {**FIELDS, "more": ((10_000,), np.dtype(np.int64))}
    for wrong, label, fields in (
        (name._replace(token=name.token + 1), LABEL, FIELDS),
        (name._replace(creator=name.creator._replace(started=1)), LABEL, FIELDS),
        (name, "rlframe-other", FIELDS),
        (name, LABEL, larger),
    ):
        with pytest.raises(FileNotFoundError):
            SharedArrays.attach(wrong, label, fields)
    SharedArrays.attach(name, LABEL, FIELDS)


def test_memory_of_another_ray_node_on_this_machine_is_refused(monkeypatch):
    monkeypatch.setenv(MACHINE, "one")
    created = SharedArrays.create("test", FIELDS)
    SharedArrays.attach(created.name, "test", FIELDS).close()
    monkeypatch.setenv(MACHINE, "other")
    with pytest.raises(PermissionError, match="another Ray node"):
        SharedArrays.attach(created.name, "test", FIELDS)


def test_memory_can_be_opened_with_an_inherited_descriptor():
    descriptor = anonymous_file(LABEL)
    here, there = SharedArrays(descriptor, FIELDS), SharedArrays(descriptor, FIELDS)
    os.close(descriptor)
    here.arrays["flags"][2] = True
    assert there.arrays["flags"].tolist() == [False, False, True, False, False]


def write_at_full_speed(name, connection):
    lock = Seqlock(SharedArrays.attach(name, LABEL, FIELDS).rows("words")[0])
    connection.send("writes")
    number = 0
    while number % 1000 or not connection.poll():
        number += 1
        lock.write(number, -number, 3 * number)


def test_reads_of_a_seqlock_return_all_numbers_of_one_write():
    created = SharedArrays.create(LABEL, FIELDS)
    lock = Seqlock(created.rows("words")[0])
    assert lock.read() == (0, 0, 0) and lock.count == 0
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=write_at_full_speed, args=(created.name, there))
    process.start()
    try:
        assert here.poll(DEADLINE)
        changes, last = 0, 0
        while changes < 1000:
            number, negative, triple = lock.read()
            assert (negative, triple) == (-number, 3 * number) and number >= last
            changes, last = changes + (number != last), number
    finally:
        here.send("stop")
        process.join(DEADLINE)
    assert process.exitcode == 0
    assert lock.count == lock.read()[0]


def test_unfinished_seqlock_write_changes_nothing():
    words = memoryview(np.zeros(Seqlock.words(2), np.int64))
    lock = Seqlock(words)
    lock.write(1, 2)
    lock.write(3, 4)
    for place in (3, 4):  # change the copy that the next write uses, but not the number of writes
        words[place] = 99
    assert lock.read() == (3, 4)


def test_wake_ends_a_wait_and_waiting_for_an_old_value_returns_at_once():
    futex = Futex(SharedArrays.create(LABEL, FIELDS).rows("words")[0][:1])
    assert not futex.wait(futex.value, 0.01)
    value = futex.value
    sleeper = threading.Thread(target=futex.wait, args=(value, DEADLINE), daemon=True)
    sleeper.start()
    futex.wake()
    sleeper.join(DEADLINE / 2)
    assert not sleeper.is_alive()
    assert futex.wait(value, DEADLINE)  # returns at once, because the word has changed
