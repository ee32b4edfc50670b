"""The queue of a run forms batches from the groups that environments send. It has no I/O, clock or randomness.

`Queue` has the commands of one run. `Epoch` has the state that a new registration resets. Example with `batch_size` 8:

1. `queue.add(...)`: environment 0, whose groups have 4 sequences, sends a group of 4. It goes into the unit queue of
   environment 0 and size 4 (`unit_queues.UnitQueues`). A group of 3 would wait in `unit_queues.UndersizedGroups` until
   more groups complete a unit of 4.
2. `queue.take(...)`: the trainer requests a batch. `unit_queues.can_fill` finds that no sum of unit sizes is 8 yet.
   The result is None.
3. Environment 1 sends a group of 4. `queue.take(now, lease_seconds=60, consumer="trainer")`: `batching.form_batch`
   takes the minimum shares first, then the oldest units, until there are exactly 8 sequences. The result is a
   `leases.LeasedBatch`.
4. `queue.ack(batch_id)`: the trainer has learned from the batch. The caller may delete the payloads in
   `epoch.released`. Without an `ack`, `queue.expire(now)` takes the batch back after 60 s, and the next request gets
   this batch.

`reports` reads an epoch without changing it, for `/status`, `/status-env` and the live page.
"""
