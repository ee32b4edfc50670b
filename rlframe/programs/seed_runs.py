"""`run_seeds`: the runs of several seeds in one process, for the topology `fused`.

Each run is a complete `run_experiment` in its own thread. They share jitted functions, and on an accelerator
also calls; see `rlframe/device/seeds.py`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Union

from rlframe.device.seeds import JointSeeds
from rlframe.engines.devices import matmul_precision
from rlframe.engines.stopping import StopSignal
from rlframe.errors import UsageError
from rlframe.programs.experiment import Experiment
from rlframe.programs.options.make_experiment import fill_configs, with_fields
from rlframe.programs.options.saved_experiment import import_env
from rlframe.programs.run_dir.directory import Result, RunDir
from rlframe.programs.run_dir.status import ControlAddress
from rlframe.programs.runner import run_experiment
from rlframe.programs.session import Shared
from rlframe.programs.topologies.makers import make_agent
from rlframe.programs.training.callbacks import Callback
from rlframe.programs.training.loop import import_late_modules
from rlframe.streams import root_handler

Outcome = Union[Result, BaseException]  # a result, or the error that ended the run

_SERVICE = "rlframe.control.app"
_POLL = 0.1  # seconds between two checks for a signal


def run_seeds(
    experiment: Experiment,
    run_dirs: Mapping[int, str | os.PathLike],
    *,
    resume: bool = False,
    take_over: bool = False,
    stop_at: int | None = None,
    callbacks: Iterable[Callback] = (),
    control_address: ControlAddress | None = None,
    ended: Callable[[int, Outcome], None] = lambda seed, outcome: None,
    poll: Callable[[], None] = lambda: None,
) -> tuple[dict[int, Outcome], int | None]:
    """Train once for each seed, all in this process. The topology must be `fused`.

    Each run gives the results of `run_experiment` with its seed, to float tolerance. Ctrl-C (or another signal) makes
    all runs save and end. If a run fails, the others continue.

    Args:
        experiment: the experiment. Its seed is not used.
        run_dirs: seed -> run directory.
        resume: continue the runs. A run that was not started yet is started.
        take_over, stop_at, control_address: see `run_experiment`.
        callbacks: see `run_experiment`. The threads of all runs call them, also at the same time.
        ended: function that is called as `ended(seed, outcome)` when a run has ended, in the thread of the run.
        poll: function that this thread calls several times a second.

    Returns:
        (outcomes, signal): seed -> outcome, and the number of the signal that ended the runs, or None.

    Raises:
        UsageError: the topology cannot run several seeds in one process, or the experiment is invalid.
    """
    if not experiment.topology_config.joins_seeds:
        raise UsageError(
            f"run_seeds needs the topology fused, but the topology is {experiment.topology_config.name}. Call "
            "run_experiment for each seed."
        )
    if experiment.topology_config.learner_devices > 1:
        raise UsageError(
            "Several seeds in one process use one device, because they are already computed together. Leave "
            "learner_devices at 1, or run each seed in its own process (--at-once)."
        )
    _import_modules(experiment, [_SERVICE] * (control_address is not None))
    group, callbacks = JointSeeds(run_dirs), list(callbacks)
    outcomes: dict[int, Outcome] = {}
    stops = {seed: StopSignal() for seed in run_dirs}

    def run(seed: int) -> None:
        has_begun = resume and RunDir(run_dirs[seed]).config.exists()
        try:
            outcomes[seed] = run_experiment(
                with_fields(experiment, seed=seed),
                run_dir=run_dirs[seed],
                resume=has_begun,
                take_over=take_over and has_begun,
                stop_at=stop_at,
                callbacks=callbacks,
                control_address=control_address,
                shared=Shared(group, stops[seed]),
            )
        except BaseException as error:
            outcomes[seed] = error
        finally:
            group.leave(seed)
        ended(seed, outcomes[seed])

    # Daemon threads, because threads that still work after a third Ctrl-C must not delay the end of the process.
    threads = [threading.Thread(target=run, args=(seed,), daemon=True) for seed in run_dirs]

    def wait() -> None:
        for thread in threads:
            while thread.is_alive():
                _forward(stop, stops.values())
                poll()
                thread.join(_POLL)

    # One handler for all threads, because each thread would remove the handler that it adds.
    precision = matmul_precision(experiment.topology_config.matmul_precision, in_process=True)
    with precision, root_handler(logging.lastResort), StopSignal() as stop:
        for thread in threads:
            thread.start()
        try:
            wait()
        except KeyboardInterrupt:  # the second signal ends the runs without a save, after the current call
            wait()
            raise
    return outcomes, stop.number


def _import_modules(experiment: Experiment, names: list[str]) -> None:
    """Import the modules of the runs in this thread. Threads that import a package at the same time can fail."""
    import_env(experiment)
    make_agent(fill_configs(experiment))
    import_late_modules(
        "rlframe.programs.topologies.fused", "rlframe.device.driver", "rlframe.device.evaluation", *names
    )


def _forward(stop: StopSignal, stops: Iterable[StopSignal]) -> None:
    """Pass new signals of the main thread to the runs."""
    for each in stops:
        if each.number is None and stop.number is not None:
            each.receive(stop.number)
        if stop.number is not None and each.is_repeated < stop.is_repeated:
            each.receive(stop.number)
