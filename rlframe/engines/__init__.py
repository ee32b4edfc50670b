"""Engines run the nodes of a program. There is one file for each engine.

A topology calls `Engine.add` once for each node of the program. `Engine.run` runs the program to its end.

    engine = LocalEngine(EngineOptions())
    learner = engine.add("learner", Learner, learner_config, agent, replay)  # a handle, for other nodes' arguments
    inferencer = Inferencer(inferencer_config, agent, learner)               # not a node: it runs in the actor's node
    actor = engine.add("actor", Actor, make_env, inferencer, replay)
    engine.add("monitor", GameMonitor, session, learner, [actor])
    engine.run()

Under the engine `local`, each node is a process (folder `supervision`). The phases of a run are:

- Start. `run` pickles each node, a `ServedNode` (`served_engine.py`), into a `StartableProcess`
  (`supervision/nodes.py`). The `ProgramSupervisor` starts it as a `RunningProcess`. In that process, `run_served_node`
  (`supervision/node_main.py`) calls the constructor, serves the object's public methods, and calls its `run()`.
- Watch. The supervisor has one `Slot` for each node, with its `NodeState`. It reads the heartbeats, the output and the
  exit codes of the processes. After each change it calls the `watch` argument of `run` with the `NodeStatus` of each
  node.
- Restart. If the actor dies, or is killed because it hangs, `ProgramSupervisor.decide_after_exit` restarts it after a
  pause (`Backoff`). The actor's handle remains valid. After too many deaths the program ends with an error.
- End. The monitor's `run()` returns after the last step, and its group ends the program (`group_rules.py: TRAITS`). The
  supervisor sends SIGTERM to the other nodes, and SIGKILL after `grace_seconds`. `run` returns or raises ProgramError.

The other engines run nodes elsewhere:

- `launchpad`: the nodes belong to a `launchpad.Program` and run under the same supervisor (`launch`). If a program
  starts with plain `lp.launch`, without an engine, each node has a guard instead (`launchpad_nodes/node.py`).
- `ray`: a Ray actor on any machine of the cluster starts the node's process. A `RunningRayNode` represents the process
  (folder `ray_nodes`).
- `threads`: each node is a thread of this process, without restarts.
- `InlineEngine` (`threads.py`) runs the single node of `single_process` in the thread that calls `run`. It has no name
  on the command line, because single-node topologies use it by default.

The other files: `base.py` has the contract of engines, `group_rules.py` has the rules for each group of nodes,
`devices.py` finds the accelerators of this machine, `logs.py` has the logs of nodes, and `stopping.py` has the handlers
of signals that end a run. `reverb_server.py` has a node with a Reverb server, and `reverb_node.py` has such a node for
`launchpad`.

In the topology elastic, workers start and end while the program runs. `SupervisedOperator` in
`rlframe.coordinator.operators` supervises them with a subclass of the same `Supervisor`.
"""

from __future__ import annotations

from rlframe.engines.base import Engine, EngineOptions

__all__ = ["Engine", "EngineOptions"]
