"""A replay on a Reverb server. `buffer.py: ReverbReplayBuffer` is the client's front.

server = reverb.Server(ReverbReplayBuffer.tables(agent), port)     # server_tables.py: tables and rate limiter
replay = ReverbReplayBuffer(agent, f"localhost:{port}")            # in each process
rank, _ = replay.claim_rank(num_envs=8)     # ranks.py: the table of claims says which ranks are taken
replay.add(env_ids, step)
  ReverbWriter.add                          # writer.py: collects steps until items are complete
  ItemRows.pack                             # item_bytes.py: each item becomes a row of bytes
  ReverbInserter.insert                     # connection.py: returns once the server has confirmed it
batch = replay.sample()
  ReverbConnection.draw                     # connection.py: rows of the table, within a deadline
  DrawnItems.take, ItemRows.unpack          # item_bytes.py: a batch of them
replay.update_priorities(batch.keys, priorities)                   # `ServerKeys` knows the server's own keys
"""

from __future__ import annotations

from rlframe.replay.reverb.buffer import ReverbReplayBuffer

__all__ = ["ReverbReplayBuffer"]
