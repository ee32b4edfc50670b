"""Operators start a coordinator's workers: as processes of this machine (`local.py`), or on Ray (`ray.py`).

`base.py` has the protocol. `supervised.py` has all but where a worker runs:

    operator.scale("collector", 2)      # `SupervisedOperator` makes two slots of its `Supervisor` (rlframe/engines)
                                        # and starts a node in each: collector/0 and collector/1
    operator.list_workers()                     # a `WorkerInfo` of each: its address, incarnation 0, problems
    # collector/1 is killed             # after the pause of `Backoff` incarnation 1 of collector/1 is started
    operator.replace(("collector/0", 0))    # the coordinator lost it: it is killed, and incarnation 1 is started
    operator.scale("collector", 1)
    operator.release(("collector/1", 1))    # it ends for good
"""
