"""The `rlframe` command.

`rlframe train --agent dqn --steps 4000`, step by step:

1. `main.py: main` finds the command in `COMMANDS`, and calls its function: `train.py: run(["--agent", "dqn", ...])`.
2. `train_options.py: read_arguments` makes an `Experiment` and a `TrainOptions` of the arguments. It uses `parsing.py`,
   which turns a dataclass into options, and an error into one sentence. `change_options` of
   `rlframe/programs/options/` puts the options that are given into the experiment, as it does for scripts.
3. `rlframe/programs/api.py: run_with_options` trains. `train.py` prints the `Result`, and `main` returns the exit code.

With `--seeds`, `seeds.py: run_seeds` makes a run for each seed. `sweep.py` does so for each trial: `sweep_options.py`
reads which options the trials vary, and `trials.py` makes the trials. Both start the runs as processes, with
`multi_run.py`.

Commands about a run that is under way (pause, scale, stop) are in `run_control.py`, which finds the run for `status.py`
too. Commands about what was learned, and how fast (evaluate, plot, bench), are in `results.py`.
"""

from rlframe.cli.main import main

__all__ = ["main"]
