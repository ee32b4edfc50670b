"""A replay buffer in the shared memory of one machine. Users call `SharedMemReplayBuffer` in buffer.py.

Example: two actor processes add steps, and a learner process samples. No process takes a lock.

    replay = SharedMemReplayBuffer(agent, num_writers=2, max_envs=8)   # a pickle contains only the memory's name
    replay.add(env_ids, step)                   # in an actor
      SegmentWriters.add                        # segment_writers.py: waits if a queue is full or sampling is late
      SegmentWriter.add                         # block.py: writes rows to its segment, then an entry to its item log
    batch = replay.sample()                     # in the learner
      Sampler.sample                            # sampler.py: draws, and updates the counters that writers wait for
      SegmentReader.sync                        # segment_reader.py: reads new entries of all logs into its table
      SegmentReader.read                        # copies the rows; replaces the rows that a writer overwrote

`block.py` defines the layout of the memory. `segment_writers.py` also writes the buffer to a checkpoint, while writers
continue.
"""

from __future__ import annotations

from rlframe.replay.shared_memory.buffer import SharedMemReplayBuffer

__all__ = ["SharedMemReplayBuffer"]
