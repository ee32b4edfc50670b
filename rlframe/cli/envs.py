"""`rlframe envs`."""

from __future__ import annotations

import dataclasses
import json
import warnings
from typing import Annotated

import tyro

from rlframe.cli.parsing import parse
from rlframe.errors import UsageError, suggest

PROG = "rlframe envs"
DESCRIPTION = (
    "List the environments that can be named. A name is an id that you registered, else an EnvPool task, else a "
    "Gymnasium id; "
    "`gymnasium:NAME`, `envpool:NAME` and `dm_control:NAME` decide. An environment of your own is file.py:make_env."
)


@dataclasses.dataclass(frozen=True)
class EnvsOptions:
    """Options of `rlframe envs`."""

    pattern: Annotated[str, tyro.conf.Positional] = ""  # only names that contain this, in any case
    json: bool = False  # print a JSON list of {"name", "backend"}
    traceback: bool = False  # show where an error came from


def run(arguments: list[str]) -> int:
    """Run the command and return its exit code."""
    options = parse(EnvsOptions, arguments, PROG, DESCRIPTION)
    from rlframe.envs import list_envs

    with warnings.catch_warnings():  # dm_control's, of a machine without a screen
        warnings.simplefilter("ignore")
        every = list_envs()
    rows = [(name, backend) for name, backend in every if options.pattern.lower() in name.lower()]
    if not rows:
        near = suggest(options.pattern, {name for name, _ in every})
        raise UsageError(f"No environment has {options.pattern!r} in its name.{near}")
    if options.json:
        print(json.dumps([{"name": name, "backend": backend} for name, backend in rows]))
        return 0
    width = max(len(name) for name, _ in rows)
    for name, backend in rows:
        print(f"{name:{width}}  {backend}")
    return 0
