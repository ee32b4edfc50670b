"""Inventories of the names of other projects to which the API reference links. Builds need no network for them."""

from __future__ import annotations

import pathlib

import sphobjinv

# project -> (address of its documentation, (name, role, page) ...)
NAMES = {
    "python": (
        "https://docs.python.org/3/",
        (
            *((name, "py:class", f"library/stdtypes.html#{name}") for name in ("dict", "int", "list", "str", "tuple")),
            *((name, "py:class", f"library/functions.html#{name}") for name in ("bool", "float")),
            ("pathlib.Path", "py:class", "library/pathlib.html#pathlib.Path"),
            ("collections.abc.Callable", "py:class", "library/collections.abc.html#collections.abc.Callable"),
            ("collections.abc.Iterator", "py:class", "library/collections.abc.html#collections.abc.Iterator"),
            ("collections.abc.Mapping", "py:class", "library/collections.abc.html#collections.abc.Mapping"),
            ("collections.abc.Sequence", "py:class", "library/collections.abc.html#collections.abc.Sequence"),
        ),
    ),
    "numpy": (
        "https://numpy.org/doc/stable/",
        (("numpy.ndarray", "py:class", "reference/generated/numpy.ndarray.html"),),
    ),
    "jax": (
        "https://docs.jax.dev/en/latest/",
        (
            ("jax.Array", "py:class", "_autosummary/jax.Array.html"),
            ("jax.jit", "py:function", "_autosummary/jax.jit.html"),
            ("jax.vmap", "py:function", "_autosummary/jax.vmap.html"),
        ),
    ),
    "gymnasium": (
        "https://gymnasium.farama.org/",
        (("gymnasium.Env", "py:class", "api/env/#gymnasium.Env"),),
    ),
}


def write(folder: pathlib.Path) -> dict[str, tuple[str, str]]:
    """Write one inventory for each project. Return the value of `intersphinx_mapping`."""
    folder.mkdir(parents=True, exist_ok=True)
    mapping = {}
    for project, (address, names) in NAMES.items():
        inventory = sphobjinv.Inventory()
        inventory.project, inventory.version = project, ""
        for name, role, page in names:
            domain, kind = role.split(":")
            inventory.objects.append(sphobjinv.DataObjStr(name, domain, kind, "1", page, "-"))
        path = folder / f"{project}.inv"
        sphobjinv.writebytes(str(path), sphobjinv.compress(inventory.data_file()))
        mapping[project] = (address, str(path))
    return mapping
