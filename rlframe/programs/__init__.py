"""Programs: an experiment's description, and what runs it."""

from __future__ import annotations

from rlframe.lazy import lazy_names

# Imported on first use: the command line parses a wrong option without waiting for JAX.
_PUBLIC = {
    "Experiment": "rlframe.programs.experiment",
    "Result": "rlframe.programs.run_dir.directory",
    "evaluate": "rlframe.programs.policies.evaluation",
    "make_experiment": "rlframe.programs.experiment",
    "load_experiment": "rlframe.programs.options.config_file",
    "train": "rlframe.programs.session",
}

__all__ = ["Experiment", "Result", "evaluate", "load_experiment", "make_experiment", "train"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
