"""A replay on a Reverb server. `buffer.py: ReverbReplayBuffer` is the client.

server = reverb.Server(ReverbReplayBuffer.tables(agent), port)     # server_tables.py: tables and rate limiter
replay = ReverbReplayBuffer(agent, f"localhost:{port}")            # in each process
rank, _ = replay.claim_rank(num_envs=8)     # server_tables.py: a table stores the claims of all ranks
replay.add(env_ids, step)
  ReverbWriter.add                          # writer.py: collects steps until items are complete
  ItemRows.pack                             # item_bytes.py: converts each item to a row of bytes
  ReverbInserter.insert                     # connection.py: returns when the server has confirmed the items
batch = replay.sample()
  ReverbConnection.draw                     # connection.py: draws rows of the table, with a deadline
  DrawnItems.take, ItemRows.unpack          # item_bytes.py: converts rows to a batch
replay.update_priorities(batch.keys, priorities)                   # `ServerKeys` finds the server's keys of the items
"""

from __future__ import annotations

from rlframe.replay.reverb.buffer import ReverbReplayBuffer

__all__ = ["ReverbReplayBuffer"]
