"""Simulate an installation with only some extras. Modules of all other installed packages are hidden from Python."""

from __future__ import annotations

import copy
import functools
import os
import pathlib
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = pathlib.Path(__file__).parent
ROOT = FOLDER.parents[1]


@functools.cache
def setup_arguments() -> dict[str, Any]:
    """Return the arguments of `setup()` in setup.py. Do not use the installed metadata, which can be out of date."""
    import runpy

    import setuptools

    arguments: dict[str, Any] = {}
    original, setuptools.setup = setuptools.setup, arguments.update
    try:
        runpy.run_path(str(ROOT / "setup.py"))
    finally:
        setuptools.setup = original
    return arguments


def distributions_of(requirements: Iterable[str]) -> set[str]:
    """Return the names of the packages that these requirements install, with all dependencies."""
    found: dict[str, set[str]] = {}
    todo = [Requirement(each) for each in requirements]
    while todo:
        requirement = todo.pop()
        name, wanted = canonicalize_name(requirement.name), {"", *requirement.extras}
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        new = wanted - found.setdefault(name, set())
        found[name] |= wanted
        for each in requirements_of(name):
            if any(each.marker is None or each.marker.evaluate({"extra": extra}) for extra in new):
                todo.append(copy.copy(each))
                todo[-1].marker = None
    return set(found)


@functools.cache
def requirements_of(name: str) -> list[Requirement]:
    """Return the requirements of an installed package. Return [] if the package is not installed."""
    distribution = installed().get(name)
    return [Requirement(each) for each in distribution.requires or []] if distribution is not None else []


@functools.cache
def installed() -> dict[str, metadata.Distribution]:
    """Return a dict of name -> distribution for all installed packages."""
    return {canonicalize_name(each.metadata["Name"]): each for each in metadata.distributions()}


@functools.cache
def modules_by_distribution() -> dict[str, set[str]]:
    """Return a dict of package name -> top-level modules for all installed packages."""
    found: dict[str, set[str]] = {}
    for name, distribution in installed().items():
        modules = found.setdefault(name, set())
        for line in (distribution.read_text("RECORD") or "").splitlines():
            first, slash, _ = line.strip('"').partition(",")[0].partition("/")
            if first.isidentifier() and slash:
                modules.add(first)
            elif not slash and first.endswith((".py", ".so")):
                modules.add(first.partition(".")[0])
    return found


@functools.cache
def visible(extras: tuple[str, ...]) -> frozenset[str]:
    """Return the top-level modules that an installation of the core package with these extras has."""
    arguments = setup_arguments()
    requirements = [
        *arguments["install_requires"],
        *(each for extra in extras for each in arguments["extras_require"][extra]),
    ]
    names = {"rlframe", "pip", *distributions_of(requirements)}
    return frozenset(module for name in names for module in modules_by_distribution().get(name, ()))


def environment(*extras: str) -> dict[str, str]:
    """Return environment variables with which Python finds only the core package and these extras."""
    every = {module for modules in modules_by_distribution().values() for module in modules}
    return {
        **os.environ,
        "PYTHONPATH": str(FOLDER),
        "RLFRAME_HIDDEN": " ".join(sorted(every - visible(extras))),
        "PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]),
    }
