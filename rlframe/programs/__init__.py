"""Programs: from the options of a run to its result.

- An experiment (`Experiment`) is what decides the numbers: the agent, the environment, the steps, the topology.
- A run is an experiment in a run directory (`RunDir`), from its first step to its last one.
- A session (`Session`) is a stretch of a run: it ends at a stop, and `--resume` begins the next one.
- A topology (`Topology`) is a function that wires a program. Its options are a `TopologyConfig`, which
  for games also has those of the environments, the network, the evaluation and the limits (`topologies/config.py`).
- A program is the nodes of a session, which an engine runs; each node is an object in a thread or a process.
- Options of a session (`SessionOptions`) are those that do not change the numbers: `run_dir`, `quiet`, `wandb`.

`rlframe train --agent dqn --env CartPole-v1 --steps 4000`, step by step:

1. `rlframe/cli/train_options.py` reads the options; in a script `api.py: train` does. An `Experiment` (`experiment.py`)
   holds those that decide the numbers, `SessionOptions` (`api.py`) the others. `presets/` has tuned values, and
   `options/` turns names into classes and values into JSON. `api.py: run_with_options` makes what `SessionOptions` ask
   for: the progress in the terminal, trackers, a profile.
2. `runner.py: run_experiment` locks the run directory and writes `config.json` (`run_dir/`). It makes the agent and a
   `Session` (`session.py`), which every node gets. With `--resume`, it first goes back to a checkpoint.
3. The topology adds nodes to an engine: `topologies/single_process.py` adds one, the `TrainingLoop`
   (`training/loop.py`). A topology of several processes adds a learner, actors and a `GameMonitor`
   (`training/game_monitor.py`).
4. The loop or the monitor counts steps. It writes rows (`training/row_writer.py`), evaluates
   (`policies/evaluation.py`), and ends at the last step, or before it by `EarlyStop` (`session.py`). Its `Result` goes
   into `result.json`, and to the caller.
5. Later, `policies/` reads the checkpoints for `rlframe.evaluate`, `load` and `export`.
"""

from __future__ import annotations

from rlframe.extras import lazy_names

# Imported on first use: the command line parses a wrong option without waiting for JAX.
_PUBLIC = {
    "Experiment": "rlframe.programs.experiment",
    "Result": "rlframe.programs.run_dir.directory",
    "evaluate": "rlframe.programs.policies.evaluation",
    "make_experiment": "rlframe.programs.options.make_experiment",
    "load_experiment": "rlframe.programs.options.config_file",
    "run_experiment": "rlframe.programs.runner",
}

__all__ = ["Experiment", "Result", "evaluate", "load_experiment", "make_experiment", "run_experiment"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
