"""The pages of the documentation: their words and their code. `python docs/pages.py` prints both counts.

A comment `<!-- not run: REASON -->` before a code block marks code that no build and no test runs.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
MOST_WORDS = 30_000  # in all pages and the README

GENERATED = "<!-- generated"  # in the first lines of a page that a script writes
_BLOCK = re.compile(
    r"(?:^<!-- not run: ([^\n]*) -->\n)?^```(\{code-cell\} )?(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE
)
_LANGUAGES = ("python", "console", "bash", "sh", "ipython3")  # other blocks show data, such as json and text


class Block(NamedTuple):
    """A block of code on a page."""

    language: str
    code: str
    is_cell: bool  # a cell of a notebook, which the build runs
    reason: str  # why the code is not run; empty if it is run


def pages() -> list[pathlib.Path]:
    """Return all pages that people wrote, the README included, in order of their paths."""
    skipped = (DOCS / "_generated", DOCS / "reference/api")
    found = (page for page in sorted(DOCS.rglob("*.md")) if not any(folder in page.parents for folder in skipped))
    return [ROOT / "README.md", *(page for page in found if GENERATED not in page.read_text()[:300])]


def blocks(page: pathlib.Path) -> Iterator[Block]:
    """Yield the code of a page, in order."""
    for reason, cell, language, code in _BLOCK.findall(page.read_text()):
        if language in _LANGUAGES:
            yield Block(language, code, bool(cell), reason)


def count_words(page: pathlib.Path) -> int:
    """Return the number of words of a page without code blocks, generated tables, comments and front matter."""
    text = re.sub(r"\A---\n.*?^---\n", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(`{3,}|:{3,}).*?^\1$", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"<!-- tables?: \w+ -->.*?<!-- end -->", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    return len(re.sub(r"\]\([^)]*\)", "]", text).split())


def not_run() -> list[tuple[str, Block]]:
    """Return the page and the block of all code that no build and no test runs."""
    return [(str(page.relative_to(ROOT)), block) for page in pages() for block in blocks(page) if block.reason]


if __name__ == "__main__":
    for page in pages():
        print(f"{count_words(page):7,}  {page.relative_to(ROOT)}")
    print(f"{sum(map(count_words, pages())):7,}  words in all, at most {MOST_WORDS:,}\n")
    for name, block in not_run():
        print(f"{name}: {block.language}, not run: {block.reason}")
    print(f"{len(not_run())} blocks of code are not run")
