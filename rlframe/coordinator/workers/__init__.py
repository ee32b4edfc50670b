"""The workers of a coordinator: learner, collectors and evaluator.

`base.py: TaskWorker` answers calls within 0.3 s, and works in a thread of its own. A collector (`collector.py`):

    ping()                              -> Alive("idle")
    start_task(header 1, StartTask("collect", ...))     -> NotReady("starting"), and later Started: the Actor is made
    get_data(header 2, GetData(...))    -> Collected: the Actor stepped for a while, and added to the replay itself
    close_task(header 3, final=True)    -> Closed: the Actor's last counters

`learner.py` answers `data_demand` and `learn` instead. `overrides.py` changes an agent or a config for one task.
"""
