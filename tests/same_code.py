"""Compare the code of two commits without its text and names: `python -m tests.same_code OLD [NEW] [--paths PATH...]`.

Strings, docstrings, names and imports are removed from the syntax trees. If functions or classes still differ, print
one line for each of them. The default for NEW is the working tree.
"""

from __future__ import annotations

import argparse
import ast
import collections
import pathlib
import subprocess
import sys
from collections.abc import Iterator

ROOTS = ("rlframe", "tests", "examples", "benchmarks", "setup.py")
_NAMES = ("id", "attr", "arg", "name", "asname", "module", "kwd_attrs", "names", "type_comment")


class _WithoutText(ast.NodeTransformer):
    """Replaces names and strings with placeholders, and removes docstrings and imports."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        for field in _NAMES:
            value = getattr(node, field, None)
            if isinstance(value, str):
                setattr(node, field, "_")
            elif field == "names" and value:  # the names in `global` and `nonlocal` statements
                node.names = ["_"] * len(value)  # type: ignore[attr-defined]
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)] or [ast.Pass()]  # type: ignore[attr-defined]
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        return ast.Constant("_") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        """Keep only the expressions in an f-string. Their order does not matter."""
        self.generic_visit(node)
        values = [value for value in node.values if isinstance(value, ast.FormattedValue)]
        if not values:
            return ast.Constant("_")
        return ast.JoinedStr(sorted(values, key=ast.dump))


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value == "_"


def _parts(source: str) -> Iterator[tuple[str, str]]:
    """Yield the name and syntax tree of each top-level statement and method.

    For a class, also yield a tree with the statements outside its methods.
    """
    tree = ast.parse(source)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            named = [(f"{node.name}.{each.name}", each) for each in methods]
            node.body = [each for each in node.body if each not in methods] or [ast.Pass()]
            yield from ((name, ast.dump(_WithoutText().visit(each))) for name, each in named)
        name = getattr(node, "name", f"line {node.lineno}")
        shape = _WithoutText().visit(node)
        if not _is_text(shape):
            yield name, ast.dump(shape)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def _sources(commit: str | None, paths: list[str], changed: set[str]) -> dict[str, str]:
    listing = _git("ls-tree", "-r", "--name-only", commit, *paths) if commit else _git("ls-files", *paths)
    files = [name for name in listing.splitlines() if name.endswith(".py") and name in changed]
    if commit:
        return {name: _git("show", f"{commit}:{name}") for name in files}
    return {name: pathlib.Path(name).read_text() for name in files if pathlib.Path(name).exists()}


def _moves(old: str, new: str | None) -> dict[str, str]:
    """Return new path -> old path of the renamed files."""
    lines = _git("diff", "-M40%", "--name-status", "--diff-filter=R", old, *([new] if new else [])).splitlines()
    return {after: before for _, before, after in (line.split("\t") for line in lines)}


def differences(old: str, new: str | None, paths: list[str]) -> list[str]:
    """Return the differences between the code of two commits, one line each."""
    changed = set(_git("diff", "--no-renames", "--name-only", old, *([new] if new else [])).splitlines())
    before, after, moves = _sources(old, paths, changed), _sources(new, paths, changed), _moves(old, new)
    found = [f"{name}: removed" for name in sorted(before.keys() - after.keys() - set(moves.values()))]
    for name in sorted(after):
        was = moves.get(name, name)
        if was not in before:
            found.append(f"{name}: added")
            continue
        left = collections.Counter(shape for _, shape in _parts(before[was]))
        right = collections.Counter(shape for _, shape in _parts(after[name]))
        more, less = right - left, left - right
        found += [f"{name}: {part}: new or changed" for part, shape in _parts(after[name]) if more[shape]]
        found += [f"{name}: {part}: gone or changed (old name)" for part, shape in _parts(before[was]) if less[shape]]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new", nargs="?")
    parser.add_argument("--paths", nargs="+", default=list(ROOTS))
    arguments = parser.parse_args()
    found = differences(arguments.old, arguments.new, arguments.paths)
    print("\n".join(found) or "The code is the same.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
