"""Tests that `pip install` copies every folder of the package and every HTML page."""

from __future__ import annotations

import fnmatch
import pathlib
import re

from setuptools import find_packages

ROOT = pathlib.Path(__file__).parents[1]


def test_every_code_folder_is_an_installed_package():
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "rlframe").rglob("*.py")}
    installed = find_packages(str(ROOT), include=["rlframe", "rlframe.*"])  # setup.py contains the same call
    assert {".".join(folder.parts) for folder in folders} == set(installed)


def test_every_html_page_is_installed():
    listed = re.search(r'package_data=\{"rlframe": \[([^\]]+)\]', (ROOT / "setup.py").read_text())
    assert listed is not None
    patterns = re.findall(r'"([^"]+)"', listed[1])
    pages = [str(path.relative_to(ROOT / "rlframe")) for path in (ROOT / "rlframe").rglob("*.html")]
    assert pages
    assert all(any(fnmatch.fnmatch(page, pattern) for pattern in patterns) for page in pages)
