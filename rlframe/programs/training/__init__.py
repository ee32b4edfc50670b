"""Training: what counts the steps of a run, writes its rows and ends it.

In a single process the `TrainingLoop` (`loop.py`) steps an actor and a learner in turn. In a program of several
processes a `Monitor` (`monitor.py`) asks the nodes ten times a second how far they are: `GameMonitor` asks actors,
`LanguageMonitor` asks a learner of language. A monitor keeps its counts in `progress.json` (`progress.py`): it may be
restarted.

Loop and monitor use the same objects. A `Schedule` (`rlframe/programs/session.py`) says when a row or an evaluation is
due. `try_evaluation` (`rlframe/programs/policies/evaluation.py`) evaluates, and returns an `EvaluationOutcome`. A
`RowWriter` (`row_writer.py`) writes the rows, and makes the `Result` with the outcome of the final evaluation. An
`EarlyStop` (`session.py`) decides whether the session ends before its last step.

A row of step 2,000: the counts since the row of step 1,000 give `episode_return` and `steps_per_second`; the learner's
newest stats give `loss` and `learner_steps`. It goes to `metrics.jsonl` and the other files of the run, to trackers, to
the progress in the terminal, and to the user's callbacks (`callbacks.py`).
"""
