"""Who may come in by the door of a run, and as what."""

from __future__ import annotations

import dataclasses
import pathlib
import socket
import sys
import threading
import time
from typing import Any

import cloudpickle
import numpy as np
import pytest

from rlframe import SyncEnv
from rlframe.actors import Actor
from rlframe.engines.launching.ports import check_free
from rlframe.errors import UnavailableError, UsageError
from rlframe.inferencers import Inferencer, InferencerConfig
from rlframe.programs import guests as entry
from rlframe.programs import join
from rlframe.programs.experiment import make_experiment
from rlframe.programs.guests import GuestParts, GuestRegistry, installed
from rlframe.programs.join import Admission, Guest, guests
from rlframe.programs.run import Run
from rlframe.programs.session import train
from tests.fakes import CountingEnv, FixedParams, RecordingBuffer, counting_agent
from tests.ports import free_port

DESCRIBED = make_experiment("impala", topology="distributed", num_envs=24, num_actors=3)
STATS = {"rank": 3, "incarnation": 0, "env_steps": 10, "episodes": 0, "return_sum": 0.0, "length_sum": 0.0}


def make_run(**changes) -> Run:
    run = Run(DESCRIBED, counting_agent(), pathlib.Path("nowhere"), until=100, began=0.0, listen=7000)
    return dataclasses.replace(run, **changes)


def ranks(at: GuestRegistry, token: str, num_actors: int) -> list[int]:
    return at.admit(token, num_actors, installed())["ranks"]


def test_ranks_follow_those_of_the_runs_own_actors_and_are_the_same_when_asked_again():
    at = GuestRegistry(make_run())
    assert ranks(at, "a", 2) == [3, 4]
    assert ranks(at, "b", 1) == [5]
    assert ranks(at, "a", 2) == [3, 4]
    at.leave("a")
    assert ranks(at, "c", 3) == [3, 4, 6]


def test_a_guest_of_an_earlier_session_is_refused_since_its_steps_are_counted_already():
    at = GuestRegistry(make_run(began=2.0))
    with pytest.raises(UsageError, match="ended, and started or resumed since: join again"):
        at.attend("a", make_run(began=1.0).session, [3], [STATS])
    assert at.heard() == []


class Wiring:
    """An engine that notes with which options actors are made."""

    def __init__(self) -> None:
        self.of_actors: list[dict[str, Any]] = []

    def add(self, group: str, constructor: Any, *args: Any, **kwargs: Any) -> str:
        if group == "actor":
            self.of_actors.append(kwargs)
        return group


def test_a_guests_actors_have_the_seed_of_the_runs_own_which_is_another_in_each_session(monkeypatch):
    def seeds(run: Run) -> set[int]:
        monkeypatch.setattr(Admission, "monitor", lambda *_: GuestRegistry(run))
        wiring = Wiring()
        guests(wiring, Admission("localhost:7000", 2, 60.0), num_inferencers=1)
        return {options["seed"] for options in wiring.of_actors}

    first, resumed = make_run(), make_run(resumed_at=500)
    assert seeds(first) == {first.actor_seed} == {DESCRIBED.seed}
    assert seeds(resumed) == {resumed.actor_seed} != {first.actor_seed}


def test_a_guest_that_is_silent_loses_its_ranks_and_comes_back_to_them_only_while_they_are_free(monkeypatch):
    monkeypatch.setattr(entry, "_LAPSES_AFTER", 0.0)
    at = GuestRegistry(make_run())
    assert ranks(at, "a", 2) == [3, 4]
    assert at.attend("a", make_run().session, [3, 4], []) == {}
    monkeypatch.undo()
    assert at.attend("a", make_run().session, [3, 4], []) == {}  # it was away, and nobody else came
    assert ranks(at, "b", 1) == [5]
    monkeypatch.setattr(entry, "_LAPSES_AFTER", 0.0)
    at.attend("a", make_run().session, [3, 4], [])
    assert ranks(at, "c", 1) == [3]
    with pytest.raises(UsageError, match=r"ranks \[3\] were given to another program"):
        at.attend("a", make_run().session, [3, 4], [])


def test_what_guests_did_is_kept_until_it_is_fetched():
    at = GuestRegistry(make_run())
    ranks(at, "a", 1)
    at.attend("a", make_run().session, [3], [STATS])
    at.attend("a", make_run().session, [3], [{**STATS, "env_steps": 20}])
    assert [stats["env_steps"] for stats in at.heard()] == [10, 20]
    assert at.heard() == []


def test_a_guests_actors_go_as_far_as_the_run_lets_them_and_then_wait(monkeypatch):
    at = GuestRegistry(make_run())
    monkeypatch.setattr(Admission, "monitor", lambda *_: at)
    monkeypatch.setattr(join, "ATTEND_EVERY", 0.01)
    admission, wiring = Admission("localhost:7000", 1, 60.0), Wiring()
    guests(wiring, admission, num_inferencers=1)
    inferencer = Inferencer(InferencerConfig(), counting_agent(), FixedParams({"w": np.float32(0.0)}))
    budget = wiring.of_actors[0]["budget"]
    actor = Actor(lambda: SyncEnv(CountingEnv, 2, "loop"), inferencer, RecordingBuffer(), rank=3, budget=budget)
    threads = [threading.Thread(target=node.run, daemon=True) for node in (Guest(admission, [actor]), actor)]
    for thread in threads:
        thread.start()
    taken = [0]
    while len(taken) < 20 or taken[-1] < 30:  # as a monitor does
        taken += [stats["env_steps"] for stats in at.heard()]
        at.lead(max(0, 30 - taken[-1]) if len(taken) > 10 else 0)
        time.sleep(0.001)
    at.end()
    threads[0].join(30.0)
    actor.stop()
    threads[1].join(30.0)
    actor.close()
    assert taken[:10] == [0] * 10
    assert actor.env_steps in (30, 31)  # of two environments at a time
    assert at.num_actors == 0


def test_how_far_a_guests_actors_may_go_is_counted_from_what_the_monitor_knew():
    at = GuestRegistry(make_run())
    assert at.attend("a", make_run().session, [3], [{**STATS, "incarnation": 2}]) == {}
    at.heard()
    at.lead(7)
    assert at.attend("a", make_run().session, [3, 4], [{**STATS, "incarnation": 2, "env_steps": 15}]) == {3: (2, 17)}
    assert at.attend("b", make_run().session, [5], []) == {}


def test_the_actors_of_guests_that_are_alive_are_counted():
    at = GuestRegistry(make_run())
    ranks(at, "a", 2)
    ranks(at, "b", 1)
    assert at.num_actors == 3
    at.leave("a")
    assert at.num_actors == 1


def test_the_end_waits_for_guests_that_are_alive_and_for_no_others():
    at = GuestRegistry(make_run())
    ranks(at, "never called", 1)
    at.wait_until_left(60.0)
    at.attend("a", make_run().session, [4], [])
    at.end()
    leaving = threading.Event()

    def leave() -> None:
        assert at.attend("a", make_run().session, [4], []) is None
        leaving.set()
        at.leave("a")

    threading.Timer(0.2, leave).start()
    at.wait_until_left(60.0)
    assert leaving.is_set()
    with pytest.raises(UsageError, match="The run is over"):
        ranks(at, "b", 1)


def test_a_door_that_was_restarted_hears_of_its_guests_before_it_admits_others(monkeypatch):
    monkeypatch.setattr(entry, "_SETTLE", 60.0)
    at = GuestRegistry(make_run(), settles=True)
    assert at.attend("a", make_run().session, [3, 4], []) == {}
    with pytest.raises(UnavailableError):
        ranks(at, "b", 1)
    assert ranks(at, "a", 2) == [3, 4]


def test_other_versions_are_refused_by_name():
    with pytest.raises(UsageError, match=r"run is of rlframe .* on Python 3.*; the machine .* has rlframe 0.0 on"):
        GuestRegistry(make_run()).admit("a", 1, {**installed(), "rlframe": "0.0"})


def test_a_run_that_does_not_listen_cannot_be_joined():
    with pytest.raises(UsageError, match="started without --listen"):
        ranks(GuestRegistry(make_run(listen=None)), "a", 1)


def test_a_users_own_environment_crosses_without_its_file(tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def make_env():\n    return 'an environment'\n")
    at = GuestRegistry(make_run(experiment=dataclasses.replace(DESCRIBED, env=f"{file}:make_env")))
    pickled = at.admit("a", 1, installed())["parts"]
    file.unlink()
    for name in [name for name in sys.modules if name.startswith("rlframe_file_own")]:
        del sys.modules[name]
    parts: GuestParts = cloudpickle.loads(pickled)
    assert parts.env() == "an environment"
    assert parts.experiment.env == f"{file}:make_env"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_in_use_is_named_with_its_option(host):
    try:
        listener = socket.create_server((host, free_port()), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        pytest.skip(f"This machine has no {host}.")
    with listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=rf"The learner cannot listen at port {port}: .*in use"):
            check_free({"learner": port})
    check_free({"learner": port})


def test_only_a_distributed_run_listens(tmp_path):
    with pytest.raises(UsageError, match="got heavy_env and local"):
        train(make_experiment("impala", topology="heavy_env"), run_dir=tmp_path / "run", listen=7000)
    assert not (tmp_path / "run").exists()
