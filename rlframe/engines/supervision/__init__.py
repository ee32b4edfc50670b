"""A supervisor starts, watches, restarts and ends the processes of nodes.

In the order of a node's life:

- `engines/group_rules.py: rules_by_group` returns the `GroupRules` of each group: restarts, threads, accelerators.
- `nodes.py`: `StartableProcess.start` returns a `RunningProcess`, with the pid, the heartbeat and the exit code.
- `node_main.py` runs in that process: it unpickles the node, constructs its object, serves it and runs it.
- `supervisor.py`: `Supervisor` handles exits, kills hung nodes, and restarts nodes after a `Backoff`.
  `ProgramSupervisor` decides how an exit affects the program, and ends all nodes together.

The class that represents a node in each stage of its life:

    stage                                             process on this machine      process of a Ray actor (`ray_nodes`)
    description: constructor and address              ServedNode                   ServedNode
    ready to start: a `StartableNode`                 StartableProcess             StartableRayNode
    running: a `RunningNode`                          RunningProcess               RunningRayNode, with a NodeHost
    supervisor's record, across restarts              Slot                         Slot
"""
