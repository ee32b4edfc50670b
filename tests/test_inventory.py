"""Test that `inventory.txt` lists the public interface: commands, flags, endpoints, names, and the files of a run.

The diff of `inventory.txt` shows which parts of the interface a change adds or removes. To update `inventory.txt`, run
`python -m tests.test_inventory`.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import io
import json
import logging
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib import metadata
from unittest import mock

from rlframe import errors
from rlframe.cli import main
from tests.extras import needs

Inventory = dict[str, list[str]]  # name of a section -> lines of the section

WRITTEN = pathlib.Path(__file__).with_name("inventory.txt")
PACKAGE = pathlib.Path(__file__).parent.parent / "rlframe"

COMMANDS = (
    "evaluate",
    "plot",
    "check-env",
    "envs",
    "agents",
    "serve trajectories",
    "serve policy",
    "status",
    "scale",
    "pause",
    "unpause",
    "stop",
    "doctor",
    "bench",
)
# Modules from which users import names. All other modules are internal.
MODULES = (
    "rlframe",
    "rlframe.actors",
    "rlframe.agents",
    "rlframe.coordinator",
    "rlframe.envs",
    "rlframe.inferencers",
    "rlframe.language",
    "rlframe.learners",
    "rlframe.metrics",
    "rlframe.programs",
    "rlframe.programs.presets",
    "rlframe.replay",
    "rlframe.testing",
    "rlframe.trajectories",
    "rlframe.types",
)
TINY = "--env-type loop --num-envs 2 --steps 64 --unroll-length 16 --num-epochs 1 --eval-episodes 1 --log-every 64"
TINY += " --network mlp --network.hidden 8 --seed 5 --quiet --json"


# --- the current inventory


def commands() -> Inventory:
    """Return each command with its flags, and with the choices of each flag."""
    scripts = metadata.entry_points(group="console_scripts")
    found = {
        "programs": [each.name for each in scripts if each.value.startswith("rlframe.")],
        "commands": re.findall(r"^  rlframe ([\w-]+)", shown("--help"), re.MULTILINE),
        "services": re.findall(r"^  (\w+)", shown("serve", "--help"), re.MULTILINE),
    }
    by_flag: dict[str, list[str]] = collections.defaultdict(list)
    for agent in agents():
        shown_flags: dict[str, None] = {}  # a dict, because the keys are an ordered set
        for topology in topologies(agent):
            shown_flags |= dict.fromkeys(flags(shown("train", "--agent", agent, "--topology", topology, "--help")))
        for flag in shown_flags:
            if not flag.startswith("--network."):  # skip flags that exist only for the network of the preset
                by_flag[flag].append(agent)
    for flag, of in by_flag.items():
        found.setdefault(f"rlframe train --agent {'|'.join(of)}", []).append(flag)
    for network in ("mlp", "nature_cnn"):
        of_network = flags(shown("train", "--network", network, "--help"))
        found[f"rlframe train --network {network}"] = [each for each in of_network if each.startswith("--network.")]
    of_train = {flag for flags_of in found.values() for flag in flags_of}
    found["rlframe sweep, in addition to those of train"] = [
        flag for flag in flags(shown("sweep", "--agent", "ppo", "--help")) if flag not in of_train
    ]
    for command in COMMANDS:
        text = shown(*command.split(), "--help")
        arguments = re.findall(r"^(?:Arguments|positional arguments):\n  (\S.*?)(?:  |$)", text, re.MULTILINE)
        found[" ".join(["rlframe", command, *arguments])] = flags(text)
    return {name: sorted(lines) for name, lines in found.items()} | {"my_env.py": of_environments()}


def of_environments() -> list[str]:
    """Return the commands and flags of programs that run an environment for a language model."""
    from rlframe.language import BaseEnv

    with mock.patch.object(sys, "argv", ["my_env.py", "--help"]), printed() as said, contextlib.suppress(SystemExit):
        BaseEnv.cli()
    return sorted([*re.findall(r"^  (\w+)", said.getvalue(), re.MULTILINE), *flags(said.getvalue())])


def endpoints() -> Inventory:
    """Return the endpoints of each HTTP service, from its OpenAPI document."""
    from rlframe.control.app import RUN, make_app
    from rlframe.language import ModelConfig, PolicyServer, PolicyServerConfig
    from rlframe.language.server.app import make_app as make_policy_app
    from rlframe.trajectories.config import Settings
    from rlframe.trajectories.service.app import make_app as make_trajectories_app

    apps = {
        "trajectories": make_trajectories_app(Settings(store="memory")),
        "policy server": make_policy_app(PolicyServer(PolicyServerConfig(), ModelConfig(), "byte", params={})),
        "control of a run": make_app(object(), kind=RUN),
        "control of a coordinator": make_app(object()),
    }
    return {name: sorted(paths(app.openapi())) for name, app in apps.items()}


def names() -> Inventory:
    """Return the names that users can import or give on the command line."""
    from rlframe.programs.presets import PRESETS

    found = {module: sorted(importlib.import_module(module).__all__) for module in MODULES}
    found["rlframe.errors"] = sorted(name for name in vars(errors) if name.endswith("Error"))
    found["agents"] = agents()
    found["networks"] = re.findall(r"\w+", refused("train", "--network", "x").split("there are")[1].split(", or")[0])
    found["presets"] = sorted(f"{preset.name}: {', '.join(preset.envs)}" for preset in PRESETS)
    found["stores of trajectories"] = re.findall(
        r"sqlite|memory|redis", refused("serve", "trajectories", "--store", "x:y").split("Stores are")[1]
    )
    found["operators"] = operators()
    found["extras"] = sorted(metadata.metadata("rlframe").get_all("Provides-Extra"))
    return found


def run_directory(path: pathlib.Path) -> Inventory:
    """Return the files of two runs, with one process and with several, and the keys in their results and rows."""
    one, several = path / "one", path / "several"
    result = json.loads(shown("train", *TINY.split(), "--run-dir", str(one)).splitlines()[-1])
    shown("train", *TINY.split(), "--run-dir", str(several), "--topology", "heavy_env", "--engine", "threads")
    rows = [json.loads(line) for line in (one / "metrics.jsonl").read_text().splitlines()]
    return {
        "files of single_process": files(one),
        "files of a topology of several processes": files(several),
        "the object of --json": sorted(result),
        "rows of metrics.jsonl": sorted({key for row in rows for key in row}),
    }


# --- helpers


@contextlib.contextmanager
def printed() -> Iterator[io.StringIO]:
    """Capture stdout. Simulate a wide terminal, so that lines are not wrapped."""
    with mock.patch.dict("os.environ", COLUMNS="400"), contextlib.redirect_stdout(io.StringIO()) as text:
        yield text


def shown(*arguments: str) -> str:
    """Run a command that must succeed. Return its output."""
    with printed() as text:
        assert main(list(arguments)) == 0
    return text.getvalue()


def refused(*arguments: str) -> str:
    """Run a command that must be refused. Return its error message."""
    with contextlib.redirect_stderr(io.StringIO()) as text:
        assert main(list(arguments)) == 2
    return text.getvalue()


def flags(text: str) -> list[str]:
    """Return the flags in a help text. If the choices of a flag are a list of words, add the choices."""
    found = []
    for option in re.findall(r"^  (--.*(?:\n {20,}.*)*)", text, re.MULTILINE):
        words = " ".join(option.split())
        name, value = re.match(r"(--[^\s,]+),? ?(\S*)", words).groups()
        listed = re.search(r"(?:One of| NAME) (\w+(?:, \w+)+)\.(?: \[\S+\])?$", words)
        choices = listed[1].split(", ") if listed else [each for each in value.split("|") if each.islower()]
        names = [name.replace("[no-]", ""), name.replace("[no-]", "no-")] if "[no-]" in name else [name]
        found.append(", ".join(names) + (f" {{{','.join(choices)}}}" if len(choices) > 1 else ""))
    return found


def topologies(agent: str) -> list[str]:
    """Return the topologies of an agent."""
    from rlframe.programs.options import registry

    return list(registry.TOPOLOGIES[registry.agent_class(agent).learns_from])


def agents() -> list[str]:
    return sorted(json.loads(shown("agents", "--json")))


def paths(openapi: dict) -> Iterable[str]:
    for path, methods in openapi["paths"].items():
        yield from (f"{method.upper()} {path}" for method in methods)


def operators() -> list[str]:
    """Return the names of the operator classes. Read the source code, because an import would require extras."""
    texts = [path.read_text() for path in PACKAGE.glob("coordinator/operators/*.py")]
    return sorted(name for text in texts for name in re.findall(r"^class (\w+Operator)\b", text, re.MULTILINE))


def files(directory: pathlib.Path) -> list[str]:
    """Return the paths in a directory and in its subdirectories. Replace each number in a path by N."""
    found = set()
    for path in [*directory.glob("*"), *directory.glob("*/*")]:
        name = re.sub(r"(events.out.tfevents).*", r"\1", str(path.relative_to(directory)))
        found.add(re.sub(r"\b\d+\b", "N", name) + "/" * path.is_dir())
    return sorted(found)


# --- the inventory file


def written(group: str) -> Inventory:
    """Return the sections that `inventory.txt` contains for one group."""
    sections: Inventory = {}
    lines: list[str] = []
    for line in WRITTEN.read_text().splitlines():
        if line.startswith("  "):
            lines.append(line.strip())
        elif line:
            of, _, name = line.partition(": ")
            lines = []
            if of == group:
                sections[name] = lines
    return sections


def to_text(group: str, found: Inventory) -> str:
    sections = ("\n".join([f"{group}: {name}", *(f"  {line}" for line in lines)]) for name, lines in found.items())
    return "\n\n".join(sections) + "\n"


def check(group: str, found: Inventory) -> None:
    """Compare a group of the inventory with `inventory.txt`. Fail if they differ. Show the differences."""
    before, now = (
        {f"{name}: {line}" for name, lines in inventory.items() for line in lines}
        for inventory in (written(group), found)
    )
    differences = [*(f"- {line}" for line in sorted(before - now)), *(f"+ {line}" for line in sorted(now - before))]
    assert not differences, "\n".join([f"{WRITTEN.name} differs in the group {group}:", *differences])


def test_commands_and_flags_match_the_inventory():
    needs("trajectories", "envs")
    check("command", commands())


def test_endpoints_match_the_inventory():
    needs("trajectories")
    check("endpoint", endpoints())


def test_public_names_match_the_inventory():
    needs("trajectories")
    check("name", names())


def test_run_directory_files_match_the_inventory(tmp_path):
    check("run", run_directory(tmp_path))


if __name__ == "__main__":
    logging.disable(logging.INFO)
    with tempfile.TemporaryDirectory() as made:
        run = run_directory(pathlib.Path(made))
    groups = {"command": commands(), "endpoint": endpoints(), "name": names(), "run": run}
    WRITTEN.write_text("\n".join(to_text(*each) for each in groups.items()))
