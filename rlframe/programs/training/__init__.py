"""Training: count the steps of a run, write the rows of its logs, evaluate, and end the run.

In a single process, the `TrainingLoop` (`loop.py`) steps an actor and a learner in turn. In a program of several
processes, a `Monitor` (`monitor.py`) polls the nodes ten times a second. A `GameMonitor` counts the steps of actors. A
`LanguageMonitor` counts the steps of the learner. A monitor saves its counts in `progress.json`
(`run_dir/directory.py: ProgressFile`), so that it can be restarted.

The loop and the monitors use the same classes:

- A `Schedule` (`rlframe/programs/session.py`) computes the steps at which a row or an evaluation is due.
- `try_evaluation` (`rlframe/programs/policies/evaluation.py`) evaluates, and returns an `EvaluationOutcome`.
- A `RowWriter` (`row_writer.py`) writes the rows, and makes the `Result` from the final evaluation.
- An `EarlyStop` (`session.py`) decides whether the session ends before its last step.

For example, the row of step 2,000 contains `episode_return` and `steps_per_second`, computed since the row of step
1,000. It also contains `loss` and `learner_steps`, from the newest stats of the learner. The row is written to
`metrics.jsonl`, to trackers and to the terminal, and the user's callbacks receive it (`callbacks.py`).
"""
