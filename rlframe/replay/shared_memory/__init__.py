"""A replay buffer in memory that processes of one machine share. `buffer.py: SharedMemReplayBuffer` is its front.

Two actors add, and a learner samples. None of them takes a lock:

    replay = SharedMemReplayBuffer(agent, num_writers=2, max_envs=8)   # pickled, it is the name of the memory
    replay.add(env_ids, step)                   # in an actor
      SegmentWriters.add                        # segment_writers.py: waits while a queue is full, or samples are behind
      SegmentWriter.add                         # block.py: writes the rows of its segment, then a line of the item log
    batch = replay.sample()                     # in the learner
      Sampler.sample                            # sampler.py: draws, and publishes its counters, for which writers wait
      SegmentReader.sync                        # segment_reader.py: reads the new lines of all logs into its table
      SegmentReader.read                        # copies the rows, and draws others where a writer overwrote one

`block.py` lays the memory out. `saving.py` writes it to a checkpoint while its writers continue.
"""

from __future__ import annotations

from rlframe.replay.shared_memory.buffer import SharedMemReplayBuffer

__all__ = ["SharedMemReplayBuffer"]
