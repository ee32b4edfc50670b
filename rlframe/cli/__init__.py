"""The `rlframe` command.

`rlframe train --agent dqn --steps 4000`, step by step:

1. `main.py: main` looks up the command in `COMMANDS`, and calls its function: `train.py: run(["--agent", "dqn", ...])`.
2. `train_options.py: read_arguments` parses the arguments to an `Experiment` and a `TrainOptions`. It uses
   `parsing.py`, which converts dataclass fields to options, and errors to one sentence. `change_options` in
   `rlframe/programs/options/` applies the given options to the experiment. Scripts use the same function.
3. `rlframe/programs/api.py: run_with_options` trains. `train.py` prints the `Result`, and `main` returns the exit code.

With `--seeds`, `seeds.py: train_seeds` starts one run for each seed. `sweep.py` starts runs for each trial:
`sweep_options.py` parses the options that vary. Both use `multi_run.py`, which runs each seed in its own process.

Commands for an active run (pause, scale, stop) are in `run_control.py`. `status.py` uses it to find the run. Commands
for results and speed (evaluate, plot, bench) are in `finished_runs.py`, and those that check an environment or this
machine in `checks.py`.
"""

from rlframe.cli.main import main

__all__ = ["main"]
