"""The queue of a run: what environments send becomes batches. Pure: no input or output, no clock, no randomness.

`Queue` has the commands of one run, `Epoch` all that starts afresh with a registration. With `batch_size` 8:

1. `queue.add(...)`: environment 0, whose groups have 4 sequences, sends a group of 4. It goes into the lane of
   environment 0 and size 4 (`lanes.UnitQueues`). A group of 3 would wait in `lanes.UndersizedGroups` until others complete a 4.
2. `queue.take(...)`: the trainer asks. `lanes.can_fill` says that no sum of sizes is 8 yet: the answer is None.
3. Environment 1 sends a group of 4. `queue.take(now, lease_seconds=60, consumer="trainer")`: `batching.form` takes the
   minimum shares first, then the oldest units, until there are exactly 8, and the answer is a `leases.LeasedBatch`.
4. `queue.ack(batch_id)`: the trainer has learned from it; the caller may delete the payloads of `epoch.forgotten`.
   Without it, `queue.expire(now)` takes the batch back after 60 s, and the next request gets it.

`reports` reads an epoch and changes nothing: `/status`, `/status-env`, and the live page.
"""
