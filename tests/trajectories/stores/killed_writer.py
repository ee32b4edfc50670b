"""A program that writes to a SQLite store until a test kills it. It prints each operation.

Run as `python -m tests.trajectories.stores.killed_writer PATH ROUND`. Each line is written in one piece, after the
store has acknowledged the operation. Lines about deletions are written before the deletion.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time

from rlframe.trajectories.stores import Store, open_store

THREADS = 4


def payload_of(record: bytes) -> bytes:
    """Return up to 60 kB of bytes that repeat the record, so that a test can detect wrong bytes."""
    size = random.Random(record).randrange(60_000)
    return (record * (size // len(record) + 1))[:size]


def print_line(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def append(store: Store, name: str) -> None:
    mine: list[int] = []
    for number in range(1_000_000):
        record = f"{name}.{number}".encode()
        position = store.append(record, payload_of(record)).result(60.0)
        print_line("appended", position, record.decode())
        mine.append(position)
        if len(mine) == 8:
            print_line("deletes", *mine[:6])
            store.delete_payloads(mine[:6])
            mine = []


def take_snapshots(store: Store) -> None:
    """Write snapshots in a loop. The state of each snapshot is the list of all records in the log."""
    position, records = 0, []
    if loaded := store.load():
        position, records = loaded[0], json.loads(loaded[1])
    while True:
        if not (found := store.read(position, 100)):
            time.sleep(0.001)
            continue
        records += [record.decode() for _, record in found]
        position = found[-1][0]
        store.snapshot(position, json.dumps(records).encode()).result(60.0)
        print_line("snapshot", position)


def main(url: str, round_: str) -> None:
    store = open_store(url)
    print_line("opened")
    threads = [threading.Thread(target=append, args=(store, f"{round_}.{thread}")) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    take_snapshots(store)


if __name__ == "__main__":
    main(*sys.argv[1:])
