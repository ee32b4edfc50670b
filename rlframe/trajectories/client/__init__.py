"""Clients of the service for environments and trainers, and the buffer that a Learner samples from.

An environment sends a group, and a learner receives it:

1. `client.TrajectoryClient(url).post(Group(tokens=..., masks=..., scores=...))` blocks. With an
   `AsyncTrajectoryClient` the call is awaited. `groups.Group` checks the arrays.
2. Both clients run the same coroutine, `calls.EnvironmentCalls.post`. It turns the group into an `HttpRequest` with an
   idempotency key, so that the service recognizes a retry.
3. `base_client.BaseClient` sends the request. It retries with a backoff until the service answers or the deadline has
   passed. `TrainerCalls` (`register`, `batch`, `ack`) are sent in the same way.
4. In the learner's process, `buffer.TrajectoryBuffer` requests the next batch in a thread while the Learner learns from
   the current one. Another thread renews the leases (`batches.py`).
5. `TrajectoryBuffer.sample` converts the groups to a `TokenBatch` with `batches.pad`, and returns it as a `Batch`.
"""
