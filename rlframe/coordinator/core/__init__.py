"""The decisions of a coordinator, without I/O and without a clock: events and the time come in, effects go out.

Deterministic: the same events at the same times give the same effects. `machine.advance(job, event, now)` takes one
event (`events.py` has all events and effects):

1. The event's handler changes the job. `job.emit` collects effects, `job.queue_call` collects workers whose next call
   must be chosen. The handlers are in two tables: `machine._HANDLERS` by the type of the event, and for the answer of
   a worker `answers._HANDLERS` by the type of the reply.
2. The job's ending begins if it is due, or takes its next steps.
3. `next_calls.call_next` chooses the next call of each collected worker, an effect too.
4. The job's state is derived, and the effects are returned. The coordinator carries them out.

All state is in a `TrainingJob` (`job.py`), whose workers and tasks are in `records.py` and whose counters are in
`accounts.py`. The functions over it:

- `machine.py`: the state of the job, its ending, and what people ask for;
- `worker_tracking.py`: workers come, answer pings, and go; its docstring lists how they go;
- `next_calls.py`: the next call of each worker;
- `answers.py`: the answers;
- `tasks.py`: tasks end or are tried again; its docstring lists how;
- `evaluations.py`: which version an evaluation is of.

Example: a collector joins, gets a task, dies, and its successor gets the task. A learner is at work already. After each
of these functions `next_calls.call_next` adds the worker's next call.

    event                                            function                      effects
    OperatorAnswered: collector/0, incarnation 0     worker_tracking.take_list     Connect(collector/0), Send(ping)
    Replied(ping, Alive)                             worker_tracking.on_ping_reply     Send(resources), Send(start_task):
                                                                                   collect/2, attempt 0
    Replied(start_task, Started)                     answers._on_started           Send(get_data)
    Replied(get_data, Collected: 64 steps)           answers._on_collected         Send(get_data): 64 steps are counted
    OperatorAnswered: without collector/0            worker_tracking.mark_lost          Disconnect(collector/0),
                                                                                   Replace(collector/0): collect/2 waits
    OperatorAnswered: collector/0, incarnation 1     worker_tracking.take_list     Connect(collector/0), Send(ping)
    Replied(ping, Alive)                             worker_tracking.on_ping_reply     Send(resources), Send(start_task):
                                                                                   collect/2, attempt 1
    Replied(get_data) of incarnation 0, late         answers.on_replied            none: it is of an older call

How the task of a running worker changes: after each answer `TrainingJob.must_close` asks the commander for the worker's
task again. If it differs, the worker's next call is `close_task`; then it is idle, and is assigned the new one.

An answer that says `NotReady` changes nothing: the same call is sent again. A worker that answers no ping for
`Limits.lost_after` is lost as well. Each event that matters to people has a `Note` among its effects.

The states that the example passes through (all transitions are in `rlframe.coordinator.states`):

    worker   REQUESTED -> CONNECTING -> IDLE <-> BUSY -> CLOSING -> IDLE     (silent: SUSPECT; at last: LOST or GONE)
    task     PENDING -> ASSIGNED -> RUNNING -> CLOSING -> SUCCEEDED          (worker lost: RETRYING -> PENDING)
    job      INIT -> CONNECTING -> WAITING -> RUNNING -> DRAINING -> CLOSED  (no learner: DEGRADED; asked to: PAUSED)
"""
