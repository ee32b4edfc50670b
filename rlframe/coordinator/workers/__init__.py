"""The workers of a coordinator: learner, collectors and evaluator.

`task_worker.py: TaskWorker` answers calls within 0.3 s, and works in a thread of its own. A collector
(`collector_worker.py`):

    ping()                              -> Alive("idle")
    start_task(header 1, StartTask("collect", ...))     -> NotReady(), and later Started: the Actor is made
    get_data(header 2, GetData(...))    -> Collected: the Actor stepped for a while, and added to the replay itself
    close_task(header 3, final=True)    -> Closed: the Actor's last counters

For an evaluator (`evaluator_worker.py`) `get_data` is the whole evaluation: it answers Evaluated. A learner
(`learner_worker.py`) answers two other calls in its place:

    data_demand(header 2)               -> Demand: the number of batches that it can take now
    learn(header 3, Learn(...))         -> Learned: it learned from as many, and published the new version

`overrides.py` changes an agent or a config for one task.
"""
