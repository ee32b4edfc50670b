"""The supervised steps before a language model learns from its own answers, as a program of one node."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Sequence

from rlframe import handles
from rlframe.errors import StoppedError
from rlframe.language.model import weights
from rlframe.language.model.tokenizers import load_tokenizer
from rlframe.learners.warm_up import warm_up
from rlframe.metrics import MultiLogger
from rlframe.programs.language.environment import env_class, env_config, model_server
from rlframe.programs.run import Run


class WarmUp:
    """Writes the weights that the environment's demonstrations lead to, to the run directory, in the published format.

    Args:
        run: the session.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._stop = threading.Event()

    def run(self) -> None:
        """Returns when they are written, or after `stop()`, when nothing is."""
        run, directory = self._run, self._run.directory
        env_cls = env_class(run.experiment.env)
        env = env_cls(env_config(env_cls, run), [model_server(run)])
        tokenizer = load_tokenizer(run.topology.tokenizer_name(run.experiment.agent_config))

        def demonstrations(source: random.Random, count: int) -> Sequence[tuple[str, str]]:  # before each update
            if self._stop.is_set():
                raise StoppedError("Told to stop in the supervised warm-up.")
            return env.demonstrations(source, count)

        logger = MultiLogger([directory.open_logs(0), *run.loggers])
        try:
            with handles.stopped_by_program(self.stop):
                params = warm_up(
                    run.agent,  # type: ignore[arg-type]
                    demonstrations,
                    tokenizer,
                    seed=run.experiment.seed,
                    logger=logger,
                )
        except StoppedError:
            return
        finally:
            logger.close()
        temporary = directory.warmup.with_suffix(".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        weights.save(temporary, run.agent.model_config, params)  # type: ignore[attr-defined]
        temporary.rename(directory.warmup)

    def end(self, by: str, evaluate: bool = True) -> None:
        """Go on to the last update, unless `evaluate` is False: what follows ends then, with weights to evaluate."""
        del by
        if not evaluate:
            self.stop()

    def stop(self) -> None:
        """Ends `run()` before the next update. Any thread may call it."""
        self._stop.set()
