"""Engines run the nodes of a program. There is one file for each engine.

A topology describes a program by calls of `Engine.add`, one for each node; `Engine.run` runs it to its end.

    engine = LocalEngine(EngineOptions())
    learner = engine.add("learner", Learner, learner_config, agent, replay)  # a handle, an argument of other objects
    inferencer = Inferencer(inferencer_config, agent, learner)               # no node: a part of the actor's
    actor = engine.add("actor", Actor, make_env, inferencer, replay)
    engine.add("monitor", GameMonitor, session, learner, [actor])
    engine.run()

What happens then under the engine `local`, whose nodes are processes (folder `supervision`):

- Start. `run` pickles each node, a `ServedNode` (`served_engine.py`), and makes it a `StartableProcess`
  (`supervision/nodes.py`). The `ProgramSupervisor` starts each one, and gets a `RunningProcess`. In that process,
  `run_served_node` (`supervision/node_main.py`) calls the constructor, serves the object's public methods, and calls
  its `run()`.
- Watch. The supervisor has one `Slot` for each node, with its `NodeState`. It reads the heartbeat of each process and
  the lines that it prints, and hears of its end. `run(watch)` passes each change on, as a `NodeStatus` of each node.
- Restart. The actor dies, or is killed because it hangs. `ProgramSupervisor.decide_after_exit` starts it again
  after the pause of `Backoff`, or, after too many deaths, ends the program with an error. Its handle stays valid.
- End. The monitor's `run()` returns after the last step: its group ends the program (`group_rules.py: TRAITS`). The
  supervisor sends SIGTERM to all others, and SIGKILL after `grace_seconds`. `run` returns, or raises `ProgramError`.

Other engines differ in where a node is:

- `launchpad`: the nodes are those of a `launchpad.Program`, under the same supervisor (`launch`). For programs that
  start with plain `lp.launch`, without an engine, `launchpad_nodes/node.py` has each node watched by a guard.
- `ray`: a `RunningRayNode` stands for the process, which a Ray actor starts beside itself, on any machine of the
  cluster (folder `ray_nodes`).
- `threads`: each node is a thread of this process; there are no restarts.
- `InlineEngine` (`inline.py`) runs the one node of `single_process` in the thread that calls `run`. It has no name on
  the command line: a topology of one node has it by default.

Beside the engines, `base.py` has their contract, `group_rules.py` what the name of a group decides, `logs.py` the lines
of nodes, `stopping.py` the signals that end a run. `reverb_server.py` is a node with a Reverb server, `reverb_node.py`
is one for `launchpad`.

Workers of elastic come and go while a program runs. A subclass of the same `Supervisor` keeps them running:
`SupervisedOperator` in `rlframe.coordinator.operators`.
"""

from __future__ import annotations

from rlframe.engines.base import Engine, EngineOptions

__all__ = ["Engine", "EngineOptions"]
