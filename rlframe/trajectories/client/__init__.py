"""The clients of the service: for environments, for trainers, and the buffer that a Learner samples from.

An environment sends a group, and a learner gets it:

1. `client.TrajectoryClient(url).post(Group(tokens=..., masks=..., scores=...))` blocks; with an `AsyncTrajectoryClient`
   it is awaited. `groups.Group` checks the arrays.
2. Both run the same coroutine, `calls.EnvironmentCalls.post`. It makes an `HttpRequest` of the group, with a key by
   which the service recognizes a repetition.
3. `exchange.BaseClient` sends the request, and repeats it after pauses until the service answers or the deadline is
   over. `TrainerCalls` (`register`, `batch`, `ack`) is sent in the same way.
4. In the learner's process, `buffer.TrajectoryBuffer` requests the next batch in a thread while the Learner learns from
   this one. Another thread renews the leases (`background.py`).
5. `TrajectoryBuffer.sample` has `padding.pad` make a `TokenBatch` of the groups, and returns it as a `Batch`.
"""
