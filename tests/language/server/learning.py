"""A GRPO learner that trains again and again on the same batch. A test runs this file in another process."""

from __future__ import annotations

import threading

from rlframe.agents import GRPO, GRPOConfig
from rlframe.learners import Learner, LearnerConfig
from tests.agents.token_batches import token_batch
from tests.language.server.serving import TINY

_PAUSE = 0.05  # seconds between two updates
_SAVE_INTERVAL = 5  # number of updates between two checkpoints


class BusyLearner(Learner):
    def __init__(self, directory: str) -> None:
        config = LearnerConfig(checkpoint_dir=directory, resume=True)
        super().__init__(config, GRPO(GRPOConfig(model=TINY, max_tokens=16, batch_size=4)), None)
        self._ended = threading.Event()

    def run(self) -> None:
        batch = token_batch(TINY.vocab_size, lengths=[9, 4, 6, 7], group=[0, 0, 1, 1])
        while not self._ended.wait(_PAUSE):
            self.step(batch)
            if self.learner_steps % _SAVE_INTERVAL == 0:
                self.save()
