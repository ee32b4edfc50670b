"""Programs: an experiment's description, and what runs it."""

from __future__ import annotations

import importlib
from typing import Any

# Resolved on first use: the command line parses a wrong option without waiting for JAX.
_PUBLIC = {
    "Experiment": "rlframe.programs.experiment",
    "Result": "rlframe.programs.run_dir.directory",
    "evaluate": "rlframe.programs.policies.evaluation",
    "make_experiment": "rlframe.programs.experiment",
    "load_experiment": "rlframe.programs.options.config_file",
    "train": "rlframe.programs.session",
}

__all__ = ["Experiment", "Result", "evaluate", "load_experiment", "make_experiment", "train"]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'rlframe.programs' has no attribute {name!r}")
