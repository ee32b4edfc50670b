"""Programs: read the options of a run, run its nodes, and write its result.

- An experiment (`Experiment`) holds the options that affect the results: agent, environment, steps and topology.
- A run is one experiment in one run directory (`RunDir`), from the first step to the last step.
- A session (`Session`) is one part of a run. A session ends when the run stops. `--resume` starts the next session.
- A topology (`Topology`) is a function that adds the nodes of a program to an engine. Its options are a
  `TopologyConfig` (`topologies/config.py`). For games, these include environments, network, evaluation and limits.
- A program is the set of nodes of a session. An engine runs the nodes. Each node is an object in a thread or a process.
- Session options (`SessionOptions`) do not affect the results: `run_dir`, `quiet`, `wandb`.

`rlframe train --agent dqn --env CartPole-v1 --steps 4000`, step by step:

1. `rlframe/cli/train_options.py` reads the options. In a script, `api.py: train` reads them. The options that affect
   the results become an `Experiment` (`experiment.py`). The others become `SessionOptions` (`api.py`). `presets/`
   holds tuned values. `options/` converts names to classes, and values to JSON. `api.py: run_with_options` makes the
   progress display, the trackers and the profile.
2. `runner.py: run_experiment` locks the run directory and writes `config.json` (`run_dir/`). It makes the agent and a
   `Session` (`session.py`), which every node receives. With `--resume`, it first checks the newest
   checkpoint. The Learner restores it.
3. The topology adds nodes to an engine. `topologies/single_process.py` adds one node, the `TrainingLoop`
   (`training/loop.py`). A topology of several processes adds a learner, actors and a `GameMonitor`
   (`training/game_monitor.py`).
4. The loop or the monitor counts steps, writes rows (`training/row_writer.py`) and evaluates
   (`policies/evaluation.py`). It ends the run at the last step, or earlier if `EarlyStop` (`session.py`) decides
   so. It writes a `Result` to `result.json`. The caller receives the same `Result`.
5. Later, `rlframe.evaluate`, `load` and `export` read the checkpoints (`policies/`).
"""

from __future__ import annotations

from rlframe.extras import lazy_names

# Imported on first use, so that the command line can refuse a wrong option without loading JAX.
_PUBLIC = {
    "Experiment": "rlframe.programs.experiment",
    "Result": "rlframe.programs.run_dir.directory",
    "evaluate": "rlframe.programs.policies.evaluation",
    "make_experiment": "rlframe.programs.options.make_experiment",
    "load_experiment": "rlframe.programs.options.saved_experiment",
    "run_experiment": "rlframe.programs.runner",
    "run_seeds": "rlframe.programs.seed_runs",
}

__all__ = ["Experiment", "Result", "evaluate", "load_experiment", "make_experiment", "run_experiment", "run_seeds"]
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
