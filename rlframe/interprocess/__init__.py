"""Tools for the processes of one machine: shared memory, waiting, heartbeats, and process lifetimes.

- Memory: `memory.py` has arrays that processes share. `waiting.py: Futex` waits until another process changes them.
- Processes: `processes.py` starts processes that die with their parent. A `ProcessId` identifies a process by its
  number and its start time.
- Hang detection: code declares the current work of a thread and its time limit, as `with phases.COMPUTING:`
  (`phases.py`). The `HeartbeatSender` of a process writes this to a page of shared memory. The process that started it
  reads the page with a `HeartbeatMonitor` (`heartbeat.py`). A process hangs if a phase exceeds its limit, or if the
  page stops changing.
- Other: `files.py` replaces files atomically. `waiting.py: Inbox` is a queue that threads and signal handlers write to.
  `malloc.py` configures glibc's malloc.
"""
