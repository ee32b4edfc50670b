"""Programs: from the options of a run to its result.

`rlframe train --agent dqn --env CartPole-v1 --steps 4000`, step by step:

1. `rlframe/cli/train_options.py` reads the options; in a script `api.py: train` does. An `Experiment` (`experiment.py`)
   holds those that decide the numbers, `SessionOptions` (`api.py`) the others. `presets/` has tuned values, and
   `options/` turns names into classes and values into JSON.
2. `session.py: train` locks the run directory and writes `config.json` (`run_dir/`). It makes the agent and a `Run`
   (`run.py`), which describes the session to every node.
3. The topology adds nodes to an engine: `topologies/single_process.py` adds one, the `TrainingLoop`
   (`training/loop.py`). A topology of several processes adds a learner, actors and a `GameMonitor`
   (`training/game_monitor.py`).
4. The loop or the monitor counts steps. It writes rows (`training/rows.py`), evaluates (`policies/evaluation.py`), and
   ends at the last step, or before it by `Ending` (`run.py`). Its `Result` goes into `result.json`, and to the caller.
5. Later, `policies/` reads the checkpoints for `rlframe.evaluate`, `load` and `export`.
"""

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
