"""Find sentences that are hard to read: `python -m tests.plain_english [PATH...]`, a part of `make lint`.

The command checks docstrings, comments, messages and test names for the patterns below. CONTRIBUTING.md shows what to
write instead. A text can be hard to read although no pattern matches.
"""

from __future__ import annotations

import ast
import io
import pathlib
import re
import sys
import tokenize
from collections.abc import Iterator

PATHS = ("rlframe", "tests", "examples", "benchmarks", "setup.py")

# A docstring or comment must start with an imperative verb or a noun, and not with these words.
OPENING = re.compile(
    r"(What|Has|Have|Who|Whoever|Whose|Of|Whether|Those|That which|There (is|are)|Where|As it|Lets|Tells|Nobody"
    r"|Whatever|(By|In|On|With|For|From|Between|To) (what|which)|How (far|many|often|long|soon))\b"
)
# Phrases that lack a noun, invert the order of words, or let objects speak or know.
PHRASE = re.compile(
    r"\b(who(ever)? (has|is|calls|asks|gives|writes|reads|was|would|knows|needs|makes|holds|waits|comes|sends|looks"
    r"|says|wants|does)|that (is|are) (to|told)|is told (that|to|by|of|what)|as it is|of (its|their|one's) own"
    r"|none of (it|them|these)|in the place of|(is|are) to be|that was given|the one (before|after|in question)|of who"
    r"|what (it|they|is|was|comes|came|goes|there is)|goes on|go on|came to|is it|be it|by hand|anew|meanwhile"
    r"|has (the|a|an|its|it) \w+ (be|go|come|begin|end|wait|start|stop)|thereof|whichever|whatever)\b",
    re.IGNORECASE,
)
TEST_NAME = re.compile(
    r"test_(what|who|whoever|whatever|whose|nobody|of|that_which)_|_(whoever|whatever|nobody|anew)(_|$)"
)
BRITISH = re.compile(
    r"(normal|optim|priorit|vector|recogn|general|initial|serial|minim|maxim|quant|organ|synchron|summar)"
    r"is(e|ed|es|ing|ation)\b|behaviour|colour|neighbour|favour|\bgrey|centred|\bmaths\b|licence|modelled|judgement",
    re.IGNORECASE,
)
_NOT_OURS = ("make_prioritised_flat_buffer",)  # names in other projects, so their spelling cannot change

Text = tuple[int, str, str]  # (line, kind, text)


def texts(source: str) -> Iterator[Text]:
    """Yield each docstring, comment, message and test name. A message is a string of four words or more."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (name := getattr(node, "name", "")).startswith("test_"):
                yield node.lineno, "test name", name  # type: ignore[attr-defined]
            if ast.get_docstring(node) is not None:
                constant = node.body[0].value  # type: ignore[attr-defined]
                docstrings.add(id(constant))
                yield constant.lineno, "docstring", constant.value
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if is_text and node.value.count(" ") >= 3:
            yield node.lineno, "message", node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.string.count(" ") >= 3:
            yield token.start[0], "comment", token.string.lstrip("# ")


def problem(kind: str, text: str) -> str | None:
    """Return the words that make a text hard to read. Return None if there are none."""
    if kind == "test name":
        found = TEST_NAME.search(text)
    else:
        found = OPENING.match(text.strip()) if kind != "message" else None
        found = found or PHRASE.search(text)
    found = found or BRITISH.search(text)
    return found.group(0) if found and not any(name in text for name in _NOT_OURS) else None


def problems(paths: list[pathlib.Path]) -> list[str]:
    """Return a line for each text that is hard to read."""
    found = []
    for path in paths:
        if path.name in ("plain_english.py", "test_plain_english.py"):
            continue  # These two files contain the patterns themselves.
        for line, kind, text in texts(path.read_text()):
            if (words := problem(kind, text)) is not None:
                start = text.strip().partition("\n")[0]
                found.append(f"{path}:{line}: {kind}: {words!r} in: {start[:100]}")
    return found


def main(arguments: list[str]) -> int:
    roots = map(pathlib.Path, arguments or PATHS)
    files = [file for root in roots for file in ([root] if root.is_file() else sorted(root.rglob("*.py")))]
    if found := problems(files):
        print("\n".join(found))
        print(f"{len(found)} texts are hard to read. CONTRIBUTING.md, 'How we write', says what to write instead.")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
