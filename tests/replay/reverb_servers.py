"""Run Reverb servers in a separate process. Tests can start, stop and kill each server."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


class Servers:
    """A process that runs Reverb servers until its parent exits.

    One process runs the servers of all tests, because importing TensorFlow is slow.
    """

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.replay.reverb_servers"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def start(self, tables: Any, port: int | None = None, checkpoints: Path | None = None) -> str:
        """Start a server with `tables`, and return its address."""
        return f"localhost:{self._ask('start', tables, port, checkpoints)}"

    def stop(self, address: str) -> None:
        """Stop one server."""
        self._ask("stop", int(address.rpartition(":")[2]))

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        self.process.kill()
        self.close()

    def close(self) -> None:
        """End the process and its servers."""
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()
        self.process.wait(timeout=30)

    def _ask(self, *message: Any) -> Any:
        pickle.dump(message, self.process.stdin)
        self.process.stdin.flush()
        return pickle.load(self.process.stdout)


def main() -> None:
    """Answer requests: ("start", tables, port, checkpoints) with the server's port, and ("stop", port) with None."""
    asked, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    import reverb

    servers: dict[int, Any] = {}
    while True:
        try:
            what, *arguments = pickle.load(asked)
        except EOFError:
            break
        if what == "start":
            tables, port, checkpoints = arguments
            saved = reverb.checkpointers.DefaultCheckpointer(str(checkpoints)) if checkpoints else None
            server = reverb.Server(tables(), port=port, checkpointer=saved)
            servers[server.port] = server
            answer = server.port
        else:
            servers.pop(arguments[0]).stop()
            answer = None
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    main()
