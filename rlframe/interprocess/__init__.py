"""Tools for the processes of one machine: shared memory, waiting, heartbeats, and process lifetimes.

- Memory: `memory.py` has arrays that processes share. With `waiting.py: Futex`, a process waits until another process
  changes these arrays.
- Processes: `processes.py` starts processes that die with their parent. A `ProcessId` identifies a process by its
  number and its start time.
- Hang detection: `with heartbeat.COMPUTING:` declares that a thread now computes, and sets a time limit for this phase.
  The `HeartbeatSender` of a process writes the phase to a page of shared memory. The parent process
  reads the page with a `HeartbeatMonitor` (`heartbeat.py`). A process is considered hung if a phase exceeds its limit,
  or if the page stops changing.
- Other: `files.py` replaces files atomically. `waiting.py: Inbox` is a queue to which threads and signal handlers add
  items. `memory.py` also configures glibc's malloc.
"""
