"""Learners hold the parameters, train them from a replay buffer and publish them.

`Learner.run()` is one loop. learner.py contains, in this order: the constructor, an update, the loop, calls from other
nodes, checkpoints. One iteration of the loop:

1. `LearnerReplay.make_dataset` (learner_replay.py) yields a `Batch` from any kind of buffer. A batch that `is_too_old`
   is dropped.
2. `LearnerUpdate` (update.py), one jitted call, returns new parameters, the agent's logs, and the parameters for
   actors.
3. `VersionCounter` (versions.py) returns the next version, and a `Publication` publishes it (params/publication.py).
4. `LearnerReplay.update_priorities` passes priorities to the buffer. Every `log_every` steps, the logger gets a row.
5. `Saver` (saving.py) decides whether a checkpoint is due. If so, `Checkpointer` writes it (checkpoints.py).
   `BestCheckpoint` (saving.py) keeps the checkpoint with the best evaluation.

Other nodes call the Learner at the same time: inferencers call `get_packed` and `publication_reader`, and the monitor
calls `stats` and `finish`.
"""

from rlframe.learners.checkpoints import Checkpointer
from rlframe.learners.config import DataConfig, LearnerConfig
from rlframe.learners.learner import Learner

__all__ = ["Checkpointer", "DataConfig", "Learner", "LearnerConfig"]
