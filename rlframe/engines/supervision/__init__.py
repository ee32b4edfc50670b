"""Nodes that are processes: started, watched, started again and ended by a supervisor.

In the order of an actor's life:

- `engines/group_rules.py: rules_by_group` gives each group its `GroupRules`: restarts, threads, the accelerator.
- `nodes.py`: `StartableProcess.start` returns a `RunningProcess`: its pid, heartbeat and exit code.
- `node_main.py` is what that process runs: it unpickles the node, makes its object, and serves and runs that.
- `supervisor.py`: `Supervisor` hears of exits, kills what hangs, and starts again after `Backoff`.
- `program_supervisor.py`: `ProgramSupervisor` decides what an exit means for the program, and ends all nodes together.

The classes about one node, by its stage:

    stage                                         a process of this machine    beside a Ray actor (`ray_nodes`)
    described: an object to make and to serve     ServedNode                   ServedNode
    can be started: a `StartableNode`             StartableProcess             StartableRayNode
    runs: a `RunningNode`                         RunningProcess               RunningRayNode, started by a NodeHost
    its place in the supervisor, over restarts    Slot                         Slot
"""
