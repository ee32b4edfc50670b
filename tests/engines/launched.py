"""A Launchpad program with small nodes. `test_launcher.py` launches it with `python launched.py BEHAVIOR`."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import launchpad as lp

from rlframe.engines.group_rules import GroupRules
from rlframe.engines.launchpad import launch
from rlframe.errors import RlframeError


class Server:
    """A counter that runs until it is stopped."""

    def __init__(self) -> None:
        self._count = 0

    def add(self) -> int:
        self._count += 1
        return self._count

    def pid(self) -> int:
        return os.getpid()

    def run(self) -> None:
        print(f"server {os.getpid()} on {os.environ.get('WHERE', 'nothing')}")
        # Wait with a timeout: a signal just before the main thread blocks would not interrupt the wait.
        while not lp.stop_event().wait(0.1):
            pass
        print("server stops")


def client(server: Any, behavior: str) -> None:
    count = server.add()
    print(f"client {os.getpid()} counts {count}")
    if behavior == "raise":
        raise ValueError("the client is unhappy")
    if behavior == "stop":
        lp.stop()
    if behavior == "wait":
        lp.stop_event().wait()
    if behavior == "kill server":
        os.kill(server.pid(), 9)
        while True:  # retry until the server has restarted at the same address
            try:
                print(f"the count of the restarted server is {server.futures.add().result(timeout=1.0)}")
                return
            except Exception:
                time.sleep(0.1)


def main(behavior: str) -> None:
    program = lp.Program("test")
    with program.group("server"):
        server = program.add_node(lp.CourierNode(Server))
    with program.group("client"):
        program.add_node(lp.PyNode(client, server, behavior))
        if behavior == "wait":
            program.add_node(lp.PyNode(client, server, behavior))
    rules = {
        "server": GroupRules(max_restarts=1, env={"WHERE": "here"}),
        "client": GroupRules(ends_program=True),
    }
    try:
        print("launched:", launch(program, rules))
    except RlframeError as error:
        print("failed:", error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main(sys.argv[1])
