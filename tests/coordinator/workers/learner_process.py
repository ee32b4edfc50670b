"""A program with a learner worker. It learns and saves once for each line of stdin, and prints the reply.

python -m tests.coordinator.workers.learner_process DIRECTORY
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path

from rlframe.coordinator.messages import Learn
from rlframe.coordinator.workers.learner_worker import LearnerWorker
from rlframe.learners import LearnerConfig
from tests.coordinator.workers.caller import Caller
from tests.coordinator.workers.test_learner_worker import filled, start
from tests.fakes import counting_agent


def main(directory: Path) -> None:
    cfg = LearnerConfig(checkpoint_dir=str(directory / "checkpoints"), resume=True, checkpoint_seconds=1e9)
    store = pickle.loads((directory / "store").read_bytes())  # a handle
    worker = LearnerWorker(cfg, counting_agent(), filled(), store, "learner/0", 0, 0)
    call = Caller(worker, "learn")
    start(call)
    print(json.dumps("started"), flush=True)
    for _ in sys.stdin:
        reply = call.until_done("learn", Learn(1, seconds=60.0, save=True))
        about = getattr(reply, "error", getattr(reply, "why", ""))
        print(json.dumps([type(reply).__name__, about, worker.ping().phase]), flush=True)
    worker.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
