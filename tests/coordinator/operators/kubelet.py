"""What runs the Pods of a `Cluster`: each as a process of this machine, with an address of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import socket
import subprocess
import sys
import threading
from typing import Any

from tests.coordinator.operators.cluster import Cluster
from tests.ports import free_port

ROOT = pathlib.Path(__file__).parents[3]
LABEL = "app.kubernetes.io/managed-by"  # of what is run here


class Kubelet:
    """Runs the first container's command and environment; tells how that goes in the Pod's status. A context manager.

    Every Pod has an address of 127.0.0.0/8. A container's ports would be the same in all of them, so `--address
    HOST:PORT` has another port in the process, and the Pod's address and PORT lead there.

    Args:
        cluster: whose Pods are run; it must not run them itself.
        logs: a directory for what they print.
    """

    def __init__(self, cluster: Cluster, logs: pathlib.Path) -> None:
        self._cluster, self._logs = cluster, logs
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ends: dict[str, _Forward] = {}
        self._numbers = itertools.count(2)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Kubelet:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()
        for process in self.processes.values():
            process.kill()
            process.wait()
        for forward in self._ends.values():
            forward.close()

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            with self._cluster._lock:
                self._look()

    def _look(self) -> None:
        pods = {name: pod for name, pod in self._cluster.pods.items() if LABEL in pod["metadata"].get("labels", {})}
        for name in set(self.processes) - set(pods):  # deleted without grace
            self.processes[name].kill()
        for name, pod in pods.items():
            if name not in self.processes:
                self._start(name, pod["spec"]["containers"][0])
            code = self.processes[name].poll()
            if "deletionTimestamp" in pod["metadata"]:
                if code is None:
                    self.processes[name].terminate()
                else:
                    self._cluster.gone(name)
            elif code is not None and pod["status"]["phase"] not in ("Failed", "Succeeded"):
                self._cluster.run(name)
                self._cluster.finish(name, code % 256, "Error" if code else "Completed")
            elif code is None and pod["status"]["phase"] == "Pending" and self._ends[name].is_served():
                self._cluster.run(name)
                pod["status"]["podIP"] = self._ends[name].ip

    def _start(self, name: str, container: dict[str, Any]) -> None:
        # Other tests of this machine have Pods too, at the same port.
        number = os.getpid() % 65_536
        ip, port = f"127.{number // 256}.{number % 256}.{next(self._numbers)}", free_port()
        command = [*container["command"], *container["args"]]
        at = command.index("--address") + 1
        host, _, listened = command[at].rpartition(":")
        self._ends[name] = _Forward(ip, int(listened), port)
        command[at] = f"{host}:{port}"
        env = {one["name"]: one.get("value", ip) for one in container["env"]}  # the one without a value is the Pod's IP
        for variable, value in env.items():
            command = [part.replace(f"$({variable})", value) for part in command]
        assert command[0] == "python"
        with open(self._logs / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command[1:]],
                env={**os.environ, "PYTHONPATH": str(ROOT), **env},
                stdout=log,
                stderr=log,
            )


class _Forward:
    """Connections to an address lead to a port of 127.0.0.1."""

    def __init__(self, ip: str, port: int, to: int) -> None:
        self.ip, self._to = ip, to
        self._listener = socket.create_server((ip, port))
        threading.Thread(target=self._accept, daemon=True).start()

    def is_served(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._to), 1.0):
            return True
        return False

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._listener.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self._to), 5.0)
                except OSError:
                    here.close()
                    continue
                there.settimeout(None)
                for ends in ((here, there), (there, here)):
                    threading.Thread(target=_copy, args=ends, daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()
