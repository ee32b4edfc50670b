"""The generated parts of the site: API reference, command line, tables of options, and code that is not run.

`write_all` writes docs/_generated, which pages include, and docs/reference/api. Neither is in git.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import os
import pathlib
import re
import shutil
import types
import unittest.mock

import pages

from rlframe.cli.help import field_comments
from rlframe.cli.main import COMMANDS, main
from rlframe.programs.options.fields import option_values
from rlframe.programs.options.registry import AGENTS, agent_class
from rlframe.programs.presets import PRESETS

DOCS = pathlib.Path(__file__).resolve().parent
GENERATED = DOCS / "_generated"
API = DOCS / "reference/api"
RESULTS = DOCS / "project/results.md"

# Public packages in the order of the reference.
PACKAGES = (
    "rlframe",
    "rlframe.agents",
    "rlframe.envs",
    "rlframe.actors",
    "rlframe.inferencers",
    "rlframe.learners",
    "rlframe.replay",
    "rlframe.programs",
    "rlframe.programs.presets",
    "rlframe.metrics",
    "rlframe.types",
    "rlframe.errors",
    "rlframe.coordinator",
    "rlframe.trajectories",
    "rlframe.language",
    "rlframe.testing",
)


def write_all() -> None:
    for folder in (GENERATED, API):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    for package in PACKAGES:
        (API / f"{package}.md").write_text(api_page(package))
    for agent in AGENTS:
        (GENERATED / f"options-{agent}.md").write_text(options_table(agent))
        (GENERATED / f"presets-{agent}.md").write_text(presets_table(agent))
        (GENERATED / f"results-{agent}.md").write_text(results_table(agent))
    for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY"):
        (GENERATED / f"{name.lower()}.md").write_text(page_of_the_repository(name))
    (GENERATED / "command-line.md").write_text(command_line())
    (GENERATED / "not-run.md").write_text(code_that_is_not_run())


def options_table(agent: str) -> str:
    """Return the options of an agent with their defaults and comments."""
    config_cls = agent_class(agent).config_cls
    comments, lines = field_comments(config_cls), ["| option | default | meaning |", "|---|---|---|"]
    for name, value in option_values(config_cls()).items():
        meaning = comments.get(name, "")
        if not meaning.startswith("Internal"):
            lines.append(f"| `--{name.replace('_', '-')}` | `{getattr(value, 'name', value)}` | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def presets_table(agent: str) -> str:
    """Return the presets of an agent: their environments and sources."""
    lines = ["| preset | environments | steps | main source |", "|---|---|---|---|"]
    for preset in PRESETS:
        if preset.agent == agent:
            sources = [setting.source for setting in preset.fields.values()]
            steps = preset.fields.get("steps")
            number = f"{steps.value:,}" if steps else ""
            main = max(sources, key=sources.count).partition("; ")[0]
            lines.append(f"| `{preset.name}` | {_cell(', '.join(preset.envs))} | {number} | {_cell(main)} |")
    return "\n".join(lines) + "\n"


def results_table(agent: str) -> str:
    """Return the rows of docs/project/results.md that belong to an agent."""
    rows = [line for line in RESULTS.read_text().splitlines() if line.startswith("|")]
    heading, first = rows[:2], f"| [{agent.upper()} "
    found = [row.replace("](#", "](../project/results.md#") for row in rows[2:] if row.startswith(first)]
    return "\n".join([*heading, *found] if found else ["No result is recorded."]) + "\n"


def page_of_the_repository(name: str) -> str:
    """Return a page outside docs/ without its title. Its links to docs/ are relative; other links become text."""
    text = (DOCS.parent / f"{name}.md").read_text().partition("\n")[2]
    text = re.sub(r"\]\(docs/", "](../", text)
    return re.sub(r"\[([^\]]*)\]\((?!\.\./|https?:|#)[^)]*\)", r"\1", text)


def command_line() -> str:
    """Return the help of every command."""
    calls = [[], *([name] for name in COMMANDS if name not in ("serve", "bench"))]
    calls += [["serve", "trajectories"], ["serve", "policy"]]
    calls += [["train", "--agent", agent] for agent in AGENTS]
    lines = []
    for call in calls:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), unittest.mock.patch.dict(os.environ, COLUMNS="100", NO_COLOR="1"):
            main([*call, "--help"])
        text = re.sub(rf"{re.escape(os.getcwd())}/|{re.escape(str(DOCS.parent))}/", "", out.getvalue()).rstrip()
        lines += [f"## rlframe {' '.join(call)}".rstrip(), "", "```text", text, "```", ""]
    return "\n".join(lines)


def code_that_is_not_run() -> str:
    """Return a table of the code that no build and no test runs."""
    found = pages.not_run()
    lines = [f"{len(found)} blocks of code are not run.", "", "| page | language | reason |", "|---|---|---|"]
    lines += [f"| {name} | {block.language} | {_cell(block.reason)} |" for name, block in found]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def api_page(package: str) -> str:
    """Return the reference page of a package: its docstring and each name in its `__all__`."""
    module = importlib.import_module(package)
    comments = module_comments(module)
    lines = [f"# {package}", "", inspect.getdoc(module).partition("\n")[0], ""]
    for name in public_names(module):
        value = getattr(module, name)
        if package == "rlframe" and (other := _other_home(name)):
            lines += [f"- {{py:obj}}`{name} <{other}.{name}>`", ""]
            continue
        is_ours = (getattr(value, "__module__", None) or "").startswith("rlframe")
        if not is_ours or (not inspect.isclass(value) and not inspect.isfunction(value)):
            lines += ["```{eval-rst}", f".. py:data:: {package}.{name}", "", f"   {comments.get(name, '')}", "```", ""]
            continue
        kind = "function" if inspect.isfunction(value) else "exception" if issubclass(value, Exception) else "class"
        lines += ["```{eval-rst}", f".. auto{kind}:: {package}.{name}", "```", ""]
    return "\n".join(lines)


def module_comments(module: types.ModuleType) -> dict[str, str]:
    """Return the comments of a module's constants: behind the assignment, or in the lines above it."""
    pattern = r"((?:^# .*\n)*)^(\w+)(?:: [^=\n]+)? = [^#\n]*(?:# (.*))?$"
    found = re.findall(pattern, inspect.getsource(module), re.MULTILINE)
    return {
        name: " ".join([*re.findall(r"^# (.*)", above, re.MULTILINE), beside]).strip() for above, name, beside in found
    }


def public_names(module: types.ModuleType) -> list[str]:
    """Return `__all__`, or the names that the module defines."""
    defined = (name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__)
    return list(getattr(module, "__all__", [name for name in defined if not name.startswith("_")]))


def _other_home(name: str) -> str | None:
    """Return the package, other than rlframe, that documents a name."""
    for package in PACKAGES[1:]:
        if name in public_names(importlib.import_module(package)):
            return package
    return None
