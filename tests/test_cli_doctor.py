"""Tests of `rlframe doctor`: it describes this machine, and it also describes machines with problems."""

from __future__ import annotations

import json
import os

import jax
import pytest

from rlframe import extras
from rlframe.cli import checks, main
from rlframe.programs.options import registry

NO_DEVICES = "import json; print(json.dumps({'version': '1', 'backend': 'cpu', 'devices': ['cpu']}))"


@pytest.fixture
def quick(monkeypatch):
    """Do not import JAX."""
    monkeypatch.setattr(checks, "_JAX", NO_DEVICES)


@pytest.fixture
def machine(tmp_path, monkeypatch, quick):
    """Return a function that writes the files of a machine, and examines it."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)

    def examine(files: dict[str, str]) -> dict:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return checks.examine(tmp_path)

    return examine


def fixes(found: dict) -> dict[str, str]:
    return {problem["wrong"]: problem["fix"] for problem in found["problems"]}


def test_report_describes_this_machine(capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and found["jax"]["version"] == jax.__version__
    assert found["jax"]["devices"] == [device.device_kind for device in jax.devices()]
    assert found["machine"]["cores"]["usable"] == len(os.sched_getaffinity(0))
    assert 0 < found["machine"]["memory"]["free"] <= found["machine"]["memory"]["total"]
    assert {name for name, state in found["extras"].items() if state["installed"]} == {
        extra for extra in extras.MODULES if extras.is_installed(extra)
    }
    works = found["works"]
    assert set(works["topology"]) == set(registry.TOPOLOGIES["steps"]) and set(works["engine"]) == set(registry.ENGINES)
    assert works["topology"]["single_process"] == works["engine"]["local"] == works["replay"]["shared_memory"] == ""


def test_missing_extra_has_its_command_and_its_use(monkeypatch, quick, capsys):
    monkeypatch.setitem(extras.MODULES, "ray", ("rlframe_absent",))
    monkeypatch.setitem(extras.MODULES, "launchpad", ("rlframe_absent",))
    monkeypatch.setattr(extras, "_MINOR", 12)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert "ray          missing, for train --engine ray, several machines: pip install 'rlframe[ray]'" in shown
    assert "    ray: pip install 'rlframe[ray]'" in shown
    assert "    launchpad: use Python 3.10, or instead --engine local, on one machine" in shown


def test_accelerator_that_jax_does_not_use_is_a_problem(machine, monkeypatch):
    found = machine({"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t NVIDIA H200\nIRQ: 1\n"})
    assert found["machine"]["accelerators"] == ["NVIDIA H200"]
    wrong = "this machine has NVIDIA H200, but JAX uses only the CPU"
    assert fixes(found)[wrong] == "pip install 'rlframe[gpu]'"
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert "unset JAX_PLATFORMS" in fixes(machine({}))[wrong]


def test_limits_of_a_container_are_found(machine, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(48)))
    group = "sys/fs/cgroup"
    files = {f"{group}/cpu.max": "200000 100000\n", f"{group}/memory.max": "1048576\n"}
    found = machine({**files, f"{group}/memory.current": "48576\n"})
    assert found["machine"]["memory"] == {"total": 1_048_576, "free": 1_000_000}
    assert found["machine"]["cores"]["quota"] == 2.0
    assert (
        "--num-workers 2"
        in fixes(found)["this container may use 2 cores, but 48 are visible, so pools start too many workers"]
    )
    assert machine({f"{group}/cpu.max": "max 100000"})["machine"]["cores"]["quota"] is None


def test_system_without_shared_memory_can_train_in_one_process(machine, monkeypatch):
    monkeypatch.setattr("rlframe.interprocess.memory.SUPPORTED", False)
    found = machine({})
    works = found["works"]["topology"]
    assert [name for name, missing in works.items() if not missing] == ["single_process", "fused"]
    assert any("only one process works" in wrong for wrong in fixes(found))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("raise ImportError('libcuda.so is missing')", "ImportError: libcuda.so is missing"),
        ("import os; os.abort()", "the process that imported JAX ended with -6"),
        ("print('no json')", "JAX printed no devices"),
        ("import time; time.sleep(60)", "no answer from JAX within 0.3 s"),
    ],
)
def test_broken_jax_is_reported(monkeypatch, capsys, code, error):
    monkeypatch.setattr(checks, "_JAX", code)
    monkeypatch.setattr(checks, "_JAX_TIMEOUT", 0.3 if "sleep" in code else 60.0)
    assert main(["doctor"]) == 1
    shown = capsys.readouterr()
    assert f"JAX does not work: {error}" in shown.out and "Traceback" not in shown.out + shown.err


def test_unreadable_machine_is_no_error(monkeypatch, quick, capsys):
    def fail(root):
        raise OSError("no such file")

    monkeypatch.setattr(checks, "_MACHINE", dict.fromkeys(checks._MACHINE, fail))
    assert main(["doctor"]) == 0
    assert "shared memory: works" in capsys.readouterr().out
