"""Training: what counts the steps of a run, writes its rows and ends it.

In a single process the `TrainingLoop` (`loop.py`) steps an actor and a learner in turn. In a program of several
processes a `Monitor` (`monitor.py`) asks the nodes ten times a second how far they are: `GameMonitor` asks actors,
`LanguageMonitor` asks a learner of language. Loop and monitor write rows with a `RowWriter` (`row_writer.py`) when a
`Schedule` (`rlframe/programs/session.py`) says that one is due. A monitor keeps its counts in
`progress.json` (`progress.py`): it may be restarted.

A row of step 2,000: the counts since the row of step 1,000 give `episode_return` and `steps_per_second`; the learner's
newest stats give `loss` and `learner_steps`. It goes to `metrics.jsonl` and the other files of the run, to trackers, to
the progress in the terminal, and to the user's callbacks (`callbacks.py`).
"""
