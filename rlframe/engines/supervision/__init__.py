"""Nodes that are processes: started, watched, started again and ended by a supervisor.

In the order of an actor's life:

- `engines/group_rules.py: rules_by_group` gives each group its `GroupRules`: restarts, threads, the accelerator.
- `node_main.py` describes the node's process, and is what it runs first. `served_node.py` is a node whose public
  methods are called by handles.
- `running.py`: `NodeProcess.start` returns a `RunningProcess`, a `RunningNode`: its pid, heartbeat and exit code.
- `supervisor.py`: `Supervisor` hears of exits, kills what hangs, and starts again after `Backoff`.
- `program_supervisor.py`: `ProgramSupervisor` decides what an exit means for the program, and ends all nodes together.

The classes about one node:

    what                                          a process of this machine    beside a Ray actor (`ray_nodes`)
    the object to make and serve, pickled         ServedNode                   ServedNode, in a HostedNode
    what can be started (`StartableNode`)         NodeProcess                  RayNode
    what runs, for the supervisor (`RunningNode`) RunningProcess               RunningRayNode
    what starts and watches the process           the launcher                 NodeHost, in the Ray actor
    its place in the supervisor, over restarts    Slot                         Slot
"""
