"""The topology elastic: workers come and go while training continues. See docs/coordinator.md.

No other topology has a coordinator (`rlframe.programs.topologies.elastic` makes it).

The objects, by process:

- The coordinator's process. `Coordinator` is a loop: it takes events (a worker answered, the operator listed its
  workers, time passed), lets the state machine in `core` decide, writes the journal, and carries out the effects.
  Three helpers carry them out: `WorkerCalls` calls workers, `OperatorThread` asks for workers, `ReplayThread` draws
  batches and pins versions. A `Commander` says what workers do and when the job is over; `TrainOne` is the plain one.
  `Scaling` chooses the number of collectors.
- The launcher's process. An operator (`operators`) keeps as many workers running as the coordinator asked for. The
  `ParamStore` has the newest parameters. Both outlive a coordinator that dies; its successor reads the journal.
- Workers (`workers`). A `LearnerWorker` learns when it is called, a `CollectorWorker` collects, an `EvaluatorWorker`
  evaluates. They answer at once, and work in a thread of their own (`TaskWorker`).
- The control (`control`). An HTTP service calls the coordinator's methods for people: status, scale, pause, stop.

Words. A job is one session of `rlframe train`, as its coordinator sees it. It has tasks, and each task a kind. A worker
has a role, and works at tasks of one kind at a time:

    role         kind of task    works with                   options of the command line
    learner      `learn`         a `Learner`
    collector    `collect`       an `Actor`                   `--num-actors`, `--min-actors`, `--max-actors`
    evaluator    `evaluate`      an `Evaluator`, no buffer    `--eval-every`, `--eval-episodes`

An incarnation is one process of a worker, an attempt is one try at a task: both are counted from 0. An event is what
the core takes (a worker answered), an effect what it returns (call a worker). A note is a line of the log for people,
which is in the journal: `Coordinator.events` and `/events` return the notes.

Messages between coordinator and workers are in `messages.py`, the states of jobs, tasks and workers in `states.py`.
Steps and parameters never pass through the coordinator.

One round, from a call to the next: the core emits `Send("collector/0", "get_data")`. `WorkerCalls` calls the worker,
which collects for 0.1 s and answers `Collected`. The event `Replied` goes to the core, which counts the steps and emits
the next `Send`. The docstring of `rlframe.coordinator.core` follows a whole example.
"""

from __future__ import annotations

from rlframe.extras import lazy_names

# Imported on first use: the commands that only talk to a coordinator do not wait for JAX.
_PUBLIC = {
    "Attempt": "rlframe.coordinator.param_store",
    "CollectorWorker": "rlframe.coordinator.workers.collector_worker",
    "Coordinator": "rlframe.coordinator.coordinator",
    "CoordinatorConfig": "rlframe.coordinator.config",
    "EvaluatorWorker": "rlframe.coordinator.workers.evaluator_worker",
    "LearnerWorker": "rlframe.coordinator.workers.learner_worker",
    "Limits": "rlframe.coordinator.config",
    "LocalOperator": "rlframe.coordinator.operators.local",
    "ParamStore": "rlframe.coordinator.param_store",
    "StartTask": "rlframe.coordinator.messages",
    "TrainOne": "rlframe.coordinator.commander",
}

__all__ = list(_PUBLIC)
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
