"""The coordinator of the elastic topology: workers start and stop while training continues. See docs/run/elastic.md.

Only the elastic topology has a coordinator. `rlframe.programs.topologies.elastic` creates it.

The objects, by process:

- The coordinator's process. `Coordinator` runs a loop: it collects events (a worker replied, the operator listed its
  workers, time passed), passes them to the state machine in `core`, writes the journal, and carries out the effects.
  Three helpers carry out effects: `WorkerCalls` calls workers, `OperatorThread` sets the number of workers, and
  `ReplayThread` draws batches and pins versions. A `Commander` chooses the tasks and decides when the job is over. The
  default is `TrainOne`. `Scaling` chooses the number of collectors.
- The launcher's process. An operator (`operators`) keeps the requested number of workers running. The `ParamStore`
  holds the newest parameters. Both survive the death of a coordinator; the next coordinator reads the journal.
- Worker processes (`workers`). A `LearnerWorker` learns, a `CollectorWorker` collects, an `EvaluatorWorker` evaluates.
  Each replies to calls at once, and does its work in a separate thread (`TaskWorker`).

Terms. A job is one session of `rlframe train`. It consists of tasks, and each task has a kind. A worker has a role, and
works on tasks of one kind:

    role         kind of task    works with                   command-line options
    learner      `learn`         a `Learner`
    collector    `collect`       an `Actor`                   `--num-actors`, `--min-actors`, `--max-actors`
    evaluator    `evaluate`      an `Evaluator`               `--eval-every`, `--eval-episodes`

An incarnation is one process of a worker; an attempt is one try at a task. Both are counted from 0. An event is an
input of the core (a worker replied); an effect is an output of the core (call a worker). A note is a log line for
people. The journal keeps the notes; `Coordinator.events` and `/events` return them.

`messages.py` defines the messages between coordinator and workers. `states.py` defines the states of jobs, tasks and
workers; the status of every run shows a `JobState`. Steps and parameters never pass through the coordinator. The HTTP
service in `rlframe.control` calls the coordinator to scale, pause or stop the job.

Example of one call: the core emits `Send("collector/0", "get_data")`. `WorkerCalls` calls the worker, which collects
steps for 0.1 s and replies with `Collected`. The core receives the event `Replied`, counts the steps, and emits the
next `Send`. The docstring of `rlframe.coordinator.core` has a longer example.
"""

from __future__ import annotations

from rlframe.extras import lazy_names

# Imported on first use, so that commands that only call a coordinator do not wait for the import of JAX.
_PUBLIC = {
    "Attempt": "rlframe.coordinator.param_store",
    "CollectorWorker": "rlframe.coordinator.workers.game_workers",
    "Coordinator": "rlframe.coordinator.coordinator",
    "CoordinatorConfig": "rlframe.coordinator.config",
    "EvaluatorWorker": "rlframe.coordinator.workers.game_workers",
    "LearnerWorker": "rlframe.coordinator.workers.learner_worker",
    "Limits": "rlframe.coordinator.config",
    "LocalOperator": "rlframe.coordinator.operators.supervised",
    "ParamStore": "rlframe.coordinator.param_store",
    "StartTask": "rlframe.coordinator.messages",
    "TrainOne": "rlframe.coordinator.commander",
}

__all__ = list(_PUBLIC)
__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
