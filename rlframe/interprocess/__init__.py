"""Processes of one machine: shared memory, waiting, heartbeats, and ending when the parent dies.

- Memory: `memory.py` has arrays that processes share, `waiting.py: Futex` waits for a change of them.
- Processes: `processes.py` starts one that dies with its parent; a `ProcessId` names it, with the time of its start.
- Hangs: code declares what a thread does, and for how long it may, as `with phases.COMPUTING:` (`phases.py`). The
  `HeartbeatSender` of a process writes this to a page of shared memory. Whoever started the process reads it with a
  `HeartbeatMonitor` (`heartbeat.py`). If a phase lasts too long, or the page does not change, the process hangs.
- `files.py` replaces files atomically, `waiting.py: Inbox` is a queue whose reader hears signals, and `malloc.py` sets
  malloc.
"""
