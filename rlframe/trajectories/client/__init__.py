"""The clients of the service: for environments, for trainers, and the buffer that a Learner samples from.

`calls.TrainerCalls` and `calls.EnvironmentCalls` are coroutines over `exchange.BaseClient`, which sends a request until
it is answered. `client.TrajectoryClient` runs them so that they block, `AsyncTrajectoryClient` is
awaited. `groups.Group` is what environments send and trainers get; `padding.pad` makes arrays of groups for
`buffer.TrajectoryBuffer`.
"""
