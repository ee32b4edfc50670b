"""The `rlframe` command.

`rlframe train --steps 4000`: `main.py` finds the module of the command, `train.py`, and calls `run(arguments)`. That
reads the options (`train_options.py`; `parsing.py` turns a dataclass into options, and an error into one sentence),
trains by `rlframe.programs.api`, and prints the result. `main` returns the exit code. With `--seeds` each run is a
process (`seeds.py`), and `sweep.py` runs several seeds for each trial (`trials.py`).
"""

from rlframe.cli.main import main

__all__ = ["main"]
