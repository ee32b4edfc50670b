"""The state machine of a coordinator: it takes events and the time, and returns effects. It does no I/O.

The machine is deterministic: the same events at the same times give the same effects. `machine.advance(job, event,
now)` handles one event (`events.py` defines all events and effects):

1. The event's handler changes the job. `job.emit` adds an effect; `job.queue_call` adds a worker whose next call must
   be chosen. There are two tables of handlers: `machine._EVENT_HANDLERS` has a handler for each type of event, and
   `replies._REPLY_HANDLERS` has a handler for each type of reply.
2. If the job must end, its ending starts. An ending that has started takes its next step.
3. `next_calls.call_next` chooses the next call to each queued worker. A call is also an effect.
4. The job's new state is computed, and the effects are returned. The coordinator carries out the effects.

All state is in a `TrainingJob` (`job.py`). Its workers and tasks are defined in `records.py`, with its
counters. The functions that change a job:

- `machine.py`: the job's state, its ending, and the requests of people;
- `worker_tracking.py`: workers appear, reply to pings, and leave. Its docstring lists the ways in which a worker ends.
- `next_calls.py`: the next call to each worker.
- `replies.py`: the replies of workers.
- `tasks.py`: tasks end or are retried, and each evaluation gets a version. Its docstring lists the ways in which a
  task ends.

Example: while a learner runs, a collector joins, gets a task, and dies. Its next incarnation gets the same task. After
each function in the table, `next_calls.call_next` adds the next call to the worker.

    event                                         function                            effects
    OperatorAnswered: collector/0, incarnation 0  worker_tracking.update_from_list    Connect(collector/0), Send(ping)
    Replied(ping, Alive)                          worker_tracking.on_ping_reply       Send(resources), Send(start_task):
                                                                                      collect/2, attempt 0
    Replied(start_task, Started)                  replies._on_started                 Send(get_data)
    Replied(get_data, Collected: 64 steps)        replies._on_collected               Send(get_data)
    OperatorAnswered: without collector/0         worker_tracking.mark_lost           Disconnect(collector/0),
                                                                                      Replace(collector/0)
    OperatorAnswered: collector/0, incarnation 1  worker_tracking.update_from_list    Connect(collector/0), Send(ping)
    Replied(ping, Alive)                          worker_tracking.on_ping_reply       Send(resources), Send(start_task):
                                                                                      collect/2, attempt 1
    Replied(get_data) of incarnation 0, late      replies.on_replied                  none

A running worker can get another task: after each reply, `TrainingJob.must_close` calls the commander. If the commander
returns another task, the next call to the worker is `close_task`. Then the worker is idle and gets the new task.

After the reply `NotReady`, the same call is repeated. A worker is lost if it replies to no ping for
`Limits.lost_after` seconds. Each event that people should see adds a `Note` to the effects.

The states in the example (`rlframe.coordinator.states` has all transitions):

    worker   REQUESTED -> CONNECTING -> IDLE <-> BUSY -> CLOSING -> IDLE     (silent: SUSPECT; at last: LOST or GONE)
    task     PENDING -> ASSIGNED -> RUNNING -> CLOSING -> SUCCEEDED          (worker lost: RETRYING -> PENDING)
    job      INIT -> CONNECTING -> WAITING -> RUNNING -> DRAINING -> CLOSED  (no learner: DEGRADED; on request: PAUSED)
"""
