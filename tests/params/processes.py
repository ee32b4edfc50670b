"""Real processes around a param store. The arrays of each version hold nothing but its number."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.errors import RlframeError
from rlframe.params import Attempt, FileParamStore, PackedParams

ROOT = Path(__file__).parents[2]
DEADLINE = 60.0  # seconds for whatever a test waits for


def params(version: int, size: int = 300_000) -> dict[str, Any]:
    """Leaves that travel together, and one by itself that takes long enough to copy to be torn."""
    fill = np.float32(version)
    return {
        "bias": np.full(7, version, np.int32),
        "layers": (np.full((3, 5), fill), np.full((), fill)),
        "table": np.full(size, version, np.int64),
    }


def numbers_in(tree: dict[str, Any]) -> set[int]:
    """Of all arrays of a version."""
    leaves = [tree["bias"], *tree["layers"], tree["table"]]
    return {int(x) for leaf in leaves for x in np.unique(leaf)}


class Process:
    """A new interpreter that runs a function of this module on a pickled store and says things, a JSON per line."""

    def __init__(self, function: Any, *args: Any) -> None:
        command = [sys.executable, "-m", "tests.params.processes"]
        self.popen = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.popen.stdin is not None
        self.popen.stdin.write(pickle.dumps((function.__name__, args)))
        self.popen.stdin.close()

    def hear(self) -> Any:
        """The next thing that it says."""
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline())

    def kill(self) -> None:
        """SIGKILL."""
        self.popen.kill()
        self.popen.wait(DEADLINE)
        assert self.popen.stdout is not None
        self.popen.stdout.close()


def say(thing: Any) -> None:
    print(json.dumps(thing), flush=True)


def write(store: Any, first: int, last: int) -> None:
    """Puts versions as fast as it can."""
    say("begins")
    for version in range(first, last + 1):
        store.put("main", version, params(version), {"version": version})
    say(store.versions("main"))


def wake(store: Any, version: int, attempt: tuple[int, int]) -> None:
    """Opens a policy and puts, again and again till that raises: says when it began, and what it raised."""
    store.open("main", Attempt(*attempt))
    while True:
        try:
            store.put("main", version, params(version), {"version": version}, attempt=Attempt(*attempt))
        except RlframeError as error:
            say([type(error).__name__, str(error)])
            return
        if not version % 10:
            say("puts")
        version += 1


def read(store: Any, versions: int) -> None:
    """Reads until so many versions were seen; says how many they were, and those not whole or not in order."""
    wrong, count, last, deadline = [], 0, -1, time.monotonic() + DEADLINE
    say("begins")
    while count < versions and time.monotonic() < deadline:
        found = store.get("main")
        if found is None:
            continue
        count += found.version != last
        if numbers_in(found.params) != {found.version} or found.hparams != {"version": found.version}:
            wrong.append([found.version, sorted(numbers_in(found.params)), found.hparams])
        if found.version < last:
            wrong.append([last, found.version])
        last = found.version
    say([count, wrong[:5]])


def stand_in_a_put(store: Any, version: int) -> None:
    """Says when a put is half done, and waits to be killed."""

    class Stands:
        def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
            stand()

    def stand(*args: Any) -> Any:
        say("in the middle")
        time.sleep(DEADLINE)

    packed = PackedParams.of(params(version))
    if isinstance(store, FileParamStore):
        os.fsync = stand
    else:  # the last of the arrays never comes
        packed.arrays[-1] = Stands()
    store.put("main", version, packed, {"version": version})


if __name__ == "__main__":
    _name, _args = pickle.load(sys.stdin.buffer)
    globals()[_name](*_args)
