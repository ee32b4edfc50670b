"""Test that imports have no cycles, and that the table in docs/project/architecture.md shows them.

`python -m tests.test_architecture` updates the table.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import pathlib
import re
from collections.abc import Iterator, Mapping

ROOT = pathlib.Path(__file__).parents[1]
PAGE = ROOT / "docs/project/architecture.md"
_TABLE = re.compile(r"^\| package \|.*?\n(?!\|)", re.DOTALL | re.MULTILINE)

# Rows of the table: package or subpackage -> text about its contents. All other files belong to the box "basics".
BOXES = {
    "cli": "commands",
    "programs": "Experiment, train, topologies/, presets/",
    "control": "status and commands of a run over HTTP",
    "coordinator": "elastic runs: core/ does no I/O",
    "engines": "run the nodes of a program",
    "device": "rounds of JAX environments and updates, in one jitted call",
    "learners": "Learner, checkpoints",
    "actors": "Actor, Evaluator",
    "inferencers": "Inferencer, batching service",
    "agents": "algorithms: pure functions",
    "envs": "SyncEnv, AsyncEnv",
    "replay": "buffers, reverb/",
    "params": "versions of parameters",
    "trajectories": "queue/, service/, stores/, client/",
    "language.environments": "BaseEnv",
    "language.server": "policy server",
    "language.warm_up": "supervised updates before GRPO",
    "language.decoding": "decode engine",
    "language.model": "transformer, tokenizers",
    "metrics": "loggers, plots",
    "http": "servers, tokens",
    "compilation": "jit with CPU options",
    "handles": "calls to other processes",
    "transport": "sockets, Courier, Ray",
    "launchpad_nodes": "guards of plain lp.launch",
    "interprocess": "shared memory, processes",
    "basics": "files beside the packages: types, errors, extras, retry, sharding, shutdown, stop_conditions, streams",
    "user_code": "files and modules that a user names",
}
_UNSEEN = ("__main__", "testing")  # modules that the table omits, because no package imports them

Graph = Mapping[str, set[str]]


def modules() -> dict[str, pathlib.Path]:
    """Return the files of the package by module name."""
    files = (ROOT / "rlframe").rglob("*.py")
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in files}


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name or "") for each import, also in functions. Skip imports that only type checkers execute."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from ((alias.name, "") for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield from ((child.module or "", alias.name) for alias in child.names)
        else:
            yield from imported(child)


@functools.cache
def parsed(path: pathlib.Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports_of_files() -> Graph:
    """Return the modules of the package that each file of the package imports."""
    files = modules()
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        names = [(name if not part else f"{name}.{part}", name) for name, part in imported(parsed(path))]
        graph[module] = {one if one in files else other for one, other in names if one in files or other in files}
        graph[module].discard(module)
    return graph


def defined(path: pathlib.Path) -> set[str]:
    """Return the names that a file defines or imports, including lazy imports."""
    names: set[str] = set()
    nodes = list(ast.walk(parsed(path)))
    if any(isinstance(node, ast.Name) and node.id == "lazy_names" for node in nodes):
        names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def box_of(module: str) -> str:
    inner = module.removeprefix("rlframe").removeprefix(".")
    parts = inner.split(".")
    return next((name for name in (".".join(parts[:2]), parts[0]) if name in BOXES), "basics")


def imports_of_boxes() -> dict[str, set[str]]:
    """Return each box with the boxes that it imports. Leave out a box if another imported box also imports it."""
    graph: dict[str, set[str]] = {box: set() for box in BOXES}
    for module, others in imports_of_files().items():
        if module == "rlframe" or module.split(".")[1] in _UNSEEN:
            continue
        graph[box_of(module)] |= {box_of(other) for other in others if other != "rlframe"} - {box_of(module)}
    reached: dict[str, set[str]] = {}
    for box in graphlib.TopologicalSorter(graph).static_order():
        reached[box] = graph[box].union(*(reached[other] for other in graph[box]))
    return {
        box: {other for other in others if not any(other in reached[one] for one in others)}
        for box, others in graph.items()
    }


def table() -> str:
    """Return the table of packages: what each one has, and which packages it imports."""
    lines = ["| package | content | imports |", "|---|---|---|"]
    for box, others in imports_of_boxes().items():
        lines.append(f"| `{box}` | {BOXES[box]} | {', '.join(f'`{other}`' for other in sorted(others))} |")
    return "\n".join([*lines, ""])


def test_imports_have_no_cycles():
    order = graphlib.TopologicalSorter(imports_of_files())
    try:
        order.prepare()
    except graphlib.CycleError as error:
        raise AssertionError(f"These files have cyclic imports: {' -> '.join(error.args[1])}") from None


def test_every_imported_name_exists():
    files, missing = modules(), []
    names = {module: defined(path) for module, path in files.items()}
    for module, path in files.items():
        for other, name in imported(parsed(path)):
            if other.partition(".")[0] != "rlframe" or f"{other}.{name}" in files:
                continue
            if other not in files or (name and name not in names[other]):
                missing.append(f"{module} imports {other}: {name}")
    assert not missing


def test_table_shows_the_imports_between_packages():
    written = _TABLE.search(PAGE.read_text(encoding="utf-8"))
    assert written is not None
    assert written[0] == table(), "Run `python -m tests.test_architecture`."


def test_each_row_of_the_table_is_a_package():
    boxes = {box_of(module) for module in modules() if module != "rlframe"}
    assert boxes == set(BOXES)


def test_no_file_has_more_than_400_lines():
    lengths = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in modules().items()}
    assert {module: length for module, length in lengths.items() if length > 400} == {}


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda _: table(), PAGE.read_text(encoding="utf-8"), count=1), encoding="utf-8")


def test_files_that_a_package_describes_exist():
    """The docstring of a package names its files as `file.py`, and other files with their paths."""
    missing = []
    for path in (ROOT / "rlframe").rglob("__init__.py"):
        text = "" if path.parent.name == "user_code" else ast.get_docstring(parsed(path)) or ""
        for name in re.findall(r"[\w/]+\.py\b", text):
            if "my_" not in name and not any(
                (folder / name).exists() for folder in (path.parent, *path.parents[1:4], ROOT / "rlframe")
            ):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing


def test_map_of_the_agents_names_every_file():
    folder = ROOT / "rlframe/agents"
    text = ast.get_docstring(parsed(folder / "__init__.py")).partition("An agent stores no parameters")[0]
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert files <= set(re.findall(r"\w+", text))
