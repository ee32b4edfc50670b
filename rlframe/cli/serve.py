"""`rlframe serve`: which service was asked for."""

from __future__ import annotations

import importlib

from rlframe.errors import UsageError, suggest

# service -> what it does, for the help. Each is a module `serve_SERVICE` here with `run(arguments) -> exit code`.
SERVICES = {
    "trajectories": "groups of sequences from environments, in batches for trainers",
    "policy": "a language model behind the OpenAI API, with its learner's newest weights",
}


def run(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    if arguments and arguments[0] in SERVICES:
        return importlib.import_module(f"rlframe.cli.serve_{arguments[0]}").run(arguments[1:])
    if arguments and arguments[0] in ("-h", "--help"):
        lines = [f"usage: rlframe serve {{{','.join(SERVICES)}}} [OPTIONS]", ""]
        print("\n".join([*lines, *(f"  {name:14} {what}" for name, what in SERVICES.items())]))
        return 0
    asked = f"{arguments[0]!r} is no service" if arguments else "Name a service"
    hint = suggest(arguments[0], SERVICES) if arguments else ""
    raise UsageError(f"{asked}; there are {', '.join(SERVICES)}.{hint}")
