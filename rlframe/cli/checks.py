"""Commands that check: `rlframe doctor` checks this machine, `rlframe check-env` checks an environment.

`rlframe doctor` shows what works, and what to install for the rest. A broken package could end the process, so `doctor`
does not import JAX or optional packages. A child process imports JAX and lists its devices.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Union

import tyro

import rlframe
from rlframe import extras
from rlframe.cli.parsing import CommandOptions, parse
from rlframe.engines.devices import find_accelerators, how_to_use
from rlframe.programs.options import registry

_DOCTOR = (
    "Show Python, JAX and its devices, memory and limits, the installed extras, and what works here. The exit code is "
    "1 if JAX does not work, and otherwise 0."
)
_CHECK_ENV = (
    "Check an environment: spaces, dtypes, NaN, seeds, resets, ends of episodes, speed and memory. Then recommend a "
    "pool and a training command. The exit code is 1 if there are errors, and 0 if there are only warnings."
)
_JAX = (
    "import jax, json; print(json.dumps({'version': jax.__version__, 'backend': jax.default_backend(), "
    "'devices': [d.device_kind for d in jax.devices()]}))"
)
_JAX_TIMEOUT = 60.0  # seconds; a driver can hang
_MIN_OPEN_FILES = 1_024  # a run of many processes opens several files for each
_MIN_RAY_MEMORY = 2**30  # bytes in /dev/shm, where Ray keeps its objects
_PROCESSES = ("heavy_env", "light_env", "distributed", "elastic")  # topologies of several processes


@dataclasses.dataclass(frozen=True)
class DoctorOptions(CommandOptions):
    """Options of `rlframe doctor`."""

    json: bool = False  # print one JSON object


def doctor(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(DoctorOptions, arguments, "rlframe doctor", _DOCTOR)
    found = examine()
    print(json.dumps(found) if options.json else _text(found))
    return 0 if found["ok"] else 1


def examine(root: pathlib.Path = pathlib.Path("/")) -> dict[str, Any]:
    """Examine this machine and this Python environment.

    Args:
        root: directory of the files that describe the machine: `/`.

    Returns:
        An object for JSON: `ok`, `rlframe`, `python`, `jax`, `machine`, `extras`, `works` and `problems`.
    """
    asked = _start_jax()
    machine = {name: _attempt(function, root) for name, function in _MACHINE.items()}
    shares_memory = _attempt(_shares_memory, root) is True
    found: dict[str, Any] = {
        "rlframe": rlframe.__version__,
        "python": {"version": platform.python_version(), "path": sys.executable, "system": platform.platform()},
        "machine": {**machine, "shares_memory": shares_memory},
        "extras": {extra: _extra(extra) for extra in extras.MODULES},
        "works": _works(shares_memory),
        "jax": _jax_answer(asked),
    }
    problems = list(_problems(found))
    return {"ok": "error" not in found["jax"], **found, "problems": problems}


def _attempt(function: Callable[[pathlib.Path], Any], root: pathlib.Path) -> Any:
    """Call a function. Return None if a file is missing, or has another format than expected."""
    try:
        return function(root)
    except Exception:  # this command must describe a broken machine, too
        return None


# --- JAX and accelerators


def _start_jax() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _JAX],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def _jax_answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return the version, the backend and the devices of JAX, or `error`."""
    try:
        out, err = process.communicate(timeout=_JAX_TIMEOUT)
        if process.returncode == 0:
            return json.loads(out.splitlines()[-1])
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"error": f"no answer from JAX within {_JAX_TIMEOUT:g} s"}
    except (ValueError, IndexError):
        return {"error": "JAX printed no devices"}
    lines = err.strip().splitlines() or [f"the process that imported JAX ended with {process.returncode}"]
    return {"error": lines[-1]}


# --- machine


def _shares_memory(root: pathlib.Path) -> bool:
    from rlframe.interprocess.memory import SUPPORTED

    return SUPPORTED


def _memory(root: pathlib.Path) -> dict[str, int]:
    """Return the bytes of memory that this process may use, and the bytes that are free."""
    import psutil

    memory = psutil.virtual_memory()
    limit, used = _limit(root, "memory.max"), _limit(root, "memory.current")
    total = min(memory.total, limit or memory.total)
    return {"total": total, "free": min(memory.available, total - used if limit and used else memory.available)}


def _limit(root: pathlib.Path, name: str) -> int | None:
    """Return a number of the control group of this container. None if there is none, or no limit."""
    path = root / "sys/fs/cgroup" / name
    text = path.read_text().split()[0] if path.exists() else "max"
    return None if text == "max" else int(text)


def _cores(root: pathlib.Path) -> dict[str, Any]:
    """Return the cores that this process may use, and the limit of processor time, in cores. None means no limit."""
    quota = None
    path = root / "sys/fs/cgroup/cpu.max"
    if path.exists() and not (words := path.read_text().split())[0].startswith("max"):
        quota = int(words[0]) / int(words[1])
    return {"usable": len(os.sched_getaffinity(0)), "total": os.cpu_count(), "quota": quota}


def _ray_memory(root: pathlib.Path) -> int:
    return shutil.disk_usage(root / "dev/shm").free


def _open_files(root: pathlib.Path) -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


_MACHINE: dict[str, Callable[[pathlib.Path], Any]] = {
    "accelerators": find_accelerators,
    "cores": _cores,
    "memory": _memory,
    "dev_shm": _ray_memory,
    "open_files": _open_files,
}


# --- extras, and what works


def _extra(extra: str) -> dict[str, Any]:
    is_installed = extras.is_installed(extra)
    install = None if is_installed else extras.how_to_install(extra)
    return {"installed": is_installed, "for": extras.USES[extra], "install": install}


def _works(shares_memory: bool) -> dict[str, dict[str, str]]:
    """Return option -> value -> "" if it works here, otherwise the missing requirement."""
    memory = "" if shares_memory else "needs Linux with memfd_create and futex"
    control = "" if extras.is_installed("trajectories") else "works with --http None; its live page needs the extra: "
    control += extras.how_to_install("trajectories") if control else ""
    return {
        "topology": {
            name: memory * (name in _PROCESSES) or control * (name == "elastic")
            for name in registry.TOPOLOGIES["steps"]
        },
        "engine": {name: _engine(name) for name in registry.ENGINES},
        "replay": {
            name: memory * (name == "shared_memory") or _missing("reverb" if name == "reverb" else "")
            for name in registry.REPLAYS
        },
    }


def _engine(name: str) -> str:
    try:
        return _missing(*registry.engine_class(name).requires)
    except Exception as error:  # a broken package
        return str(error)


def _missing(*names: str) -> str:
    absent = [name for name in names if name and not extras.is_installed(name)]
    return extras.how_to_install(*absent) if absent else ""


# --- problems


def _problems(found: dict[str, Any]) -> Iterator[dict[str, str]]:
    """Yield {"wrong", "fix"} for everything that should be different."""
    jax, machine = found["jax"], found["machine"]
    if "error" in jax:
        yield _problem(
            f"JAX does not work: {jax['error']}", "Install it again: pip install --force-reinstall jax jaxlib"
        )
    elif machine["accelerators"] and jax["backend"] == "cpu":
        names = machine["accelerators"]
        yield _problem(f"this machine has {', '.join(names)}, but JAX uses only the CPU", how_to_use(names))
    if not machine["shares_memory"]:
        yield _problem(
            "processes cannot share memory here, so only one process works",
            "Use Linux. On Windows: WSL. Train with --topology single_process or fused, and --env-type loop or thread.",
        )
    cores, memory = machine["cores"], machine["dev_shm"]
    if cores and cores["quota"] and cores["quota"] < cores["usable"]:
        workers = max(1, int(cores["quota"]))
        yield _problem(
            f"this container may use {cores['quota']:g} cores, but {cores['usable']} are visible, so pools start too "
            "many workers",
            f"Train with --num-workers {workers}, or give the container more cores.",
        )
    if machine["open_files"] and machine["open_files"] < _MIN_OPEN_FILES:
        yield _problem(f"only {machine['open_files']} files can be open at a time", "ulimit -n 65536")
    if found["extras"]["ray"]["installed"] and memory is not None and memory < _MIN_RAY_MEMORY:
        yield _problem(
            f"/dev/shm has {memory / 2**20:,.0f} MB, but Ray keeps its objects there",
            "Start the container with more, such as docker run --shm-size 8g. Other engines do not use it.",
        )


def _problem(wrong: str, fix: str) -> dict[str, str]:
    return {"wrong": wrong, "fix": fix}


# --- text


def _text(found: dict[str, Any]) -> str:
    """Return the report for a person."""
    jax, machine, python = found["jax"], found["machine"], found["python"]
    devices = jax.get("error") or f"{jax['version']} on {jax['backend']}: {', '.join(jax['devices'])}"
    lines = [
        f"rlframe {found['rlframe']}, Python {python['version']} ({python['path']}), {python['system']}",
        f"JAX {devices}",
        *_machine_lines(machine),
        "",
        "what works:",
    ]
    for option, values in found["works"].items():
        working = [name for name, missing in values.items() if not missing]
        lines.append(f"  --{option:9}{', '.join(working) or 'nothing'}")
        lines += [f"    {name}: {missing}" for name, missing in values.items() if missing]
    lines += ["", "extras:"]
    for extra, state in found["extras"].items():
        text = "installed" if state["installed"] else f"missing, for {state['for']}: {state['install']}"
        lines.append(f"  {extra:13}{text}")
    lines += ["", "problems:" if found["problems"] else "No problems."]
    lines += [f"  {problem['wrong']}\n    fix: {problem['fix']}" for problem in found["problems"]]
    return "\n".join(lines)


def _machine_lines(machine: dict[str, Any]) -> Iterator[str]:
    cores, memory, shared = machine["cores"], machine["memory"], machine["dev_shm"]
    if cores:
        quota = "" if cores["quota"] is None else f", processor time of {cores['quota']:g}"
        yield f"cores: {cores['usable']} of {cores['total']}{quota}"
    if memory:
        yield f"memory: {memory['free'] / 2**30:.1f} of {memory['total'] / 2**30:.1f} GiB free"
    shares = "works" if machine["shares_memory"] else "does not work"
    room = "" if shared is None else f", /dev/shm (for Ray only) has {shared / 2**30:.1f} GiB"
    yield f"shared memory: {shares}{room}"
    if machine["open_files"]:
        yield f"open files: at most {machine['open_files']:,}"


@dataclasses.dataclass(frozen=True)
class CheckEnvOptions(CommandOptions):
    """Options of `rlframe check-env`."""

    # a name from `rlframe envs`, or file.py:make_env
    env: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="ENV")]
    env_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)  # keyword arguments of the environment
    seed: int = 0  # seed of the environment
    num_envs: Union[int, None] = None  # environments of the later run; None means the default of train
    seconds: float = 2.0  # time for each of the longer checks; long episodes need more
    json: bool = False  # print the report as one JSON object in the last line of stdout


def check_env(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(CheckEnvOptions, arguments, "rlframe check-env", _CHECK_ENV)
    from rlframe.programs.env_check import check

    seed, num_envs, seconds = options.seed, options.num_envs, options.seconds
    report = check.check_env(options.env, options.env_kwargs, seed=seed, num_envs=num_envs, seconds=seconds)
    print(json.dumps(report.to_json()) if options.json else report)
    return 0 if report.ok else 1
