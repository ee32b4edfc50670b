"""The workers of a coordinator: learner, collectors and evaluator.

`task_worker.py: TaskWorker` replies to each call within 0.3 s, and does the work in a separate thread. The calls and
replies of a collector (`game_workers.py`):

    ping()                                           -> Alive("idle")
    start_task(header 1, StartTask("collect", ...))  -> NotReady, later Started: the Actor exists
    get_data(header 2, GetData(...))                 -> Collected: the Actor has added steps to the replay buffer
    close_task(header 3, final=True)                 -> Closed: the Actor's last counters

For an evaluator (`game_workers.py`), `get_data` is a whole evaluation, and the reply is Evaluated. A learner
(`learner_worker.py`) has two other calls instead of `get_data`:

    data_demand(header 2)                            -> Demand: the number of batches that it can accept now
    learn(header 3, Learn(...))                      -> Learned: it has learned, and published a new version

`overrides.py` changes an agent or a config for one task.
"""
