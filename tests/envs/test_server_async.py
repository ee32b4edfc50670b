"""An Actor in another process sends actions to an `EnvServer` with an `AsyncEnv`, and receives timesteps from it."""

from __future__ import annotations

import functools
import multiprocessing
import threading

import numpy as np
import pytest

from rlframe import Actor, AsyncEnv, EnvServer, Inferencer, InferencerConfig, SyncEnv
from rlframe.engines.supervision.node_main import public_methods
from rlframe.envs import as_pool
from rlframe.errors import EnvError, PeerError, UsageError
from rlframe.handles import Remote
from rlframe.transport.sockets import SocketTransport
from rlframe.types import FIRST, LAST, MID
from tests.extras import needs
from tests.fakes import CountingEnv, FixedParams, RecordingBuffer, counting_agent
from tests.in_process import InProcess

DEADLINE = 60.0


def async_envs(size=3, wait_num=2, env=CountingEnv, **options):
    return AsyncEnv(env, size, wait_num, "thread", num_workers=size, **options)


def served(transport, *builders):
    """Serve an EnvServer for each builder. Return the handles and the nodes."""
    nodes = [transport.serve(public_methods(EnvServer(builder))) for builder in builders]
    return [Remote([node.address], "EnvServer", DEADLINE, None, transport) for node in nodes], nodes


@pytest.fixture(params=["in process", "sockets", "courier"])
def transport(request):
    if request.param == "in process":
        return InProcess()
    if request.param == "sockets":
        return SocketTransport()
    needs("launchpad")
    from rlframe.transport.courier import CourierTransport

    return CourierTransport()


def play(pool, calls):
    """Step a pool at least `calls` times, until each environment has made 6 steps.

    Returns:
        A dict of environment id -> list of (step type, observation), in the order of the steps.
    """
    seen = {env_id: [] for env_id in range(pool.num_envs)}
    while calls > 0 or min(map(len, seen.values())) <= 5:  # on a busy machine, an environment can wait a long time
        calls -= 1
        env_ids, timestep = pool.recv()
        assert env_ids.dtype == np.int32 and len(env_ids) == pool.wait_num
        for env_id, kind, observation in zip(env_ids.tolist(), timestep.step_type, timestep.observation, strict=True):
            seen[env_id].append((int(kind), observation.tolist()))
        pool.send(env_ids, np.zeros(len(env_ids), np.int32))
    return seen


def test_served_environments_return_the_same_steps_as_local_environments(transport):
    """Each episode has the step types FIRST, MID, MID, LAST. Then the next episode begins automatically."""
    handles, nodes = served(transport, async_envs)
    pool = as_pool(handles[0])
    assert (pool.num_envs, pool.wait_num, pool.is_sync) == (3, 2, False)
    theirs = play(pool, 40)
    with async_envs() as local:
        ours = play(local, 40)
    kinds = [FIRST, MID, MID, LAST] * 40
    for env_id in range(3):
        assert [kind for kind, _ in theirs[env_id]] == kinds[: len(theirs[env_id])]
        both = list(zip(ours[env_id], theirs[env_id], strict=False))
        assert len(both) > 5 and all(mine == its for mine, its in both)
    for node in nodes:
        node.stop()


def test_several_servers_form_one_pool(transport):
    handles, nodes = served(transport, *[async_envs] * 2)
    pool = as_pool(handles)
    assert (pool.num_envs, pool.wait_num) == (6, 2)
    seen = play(pool, 60)
    kinds = [FIRST, MID, MID, LAST] * 60
    assert all(len(each) > 3 for each in seen.values())
    assert all([kind for kind, _ in each] == kinds[: len(each)] for each in seen.values())
    for node in nodes:
        node.stop()


def make_actor(env, **options):
    inferencer = Inferencer(InferencerConfig(), counting_agent(), FixedParams({"w": np.float32(0.5)}))
    return Actor(env, inferencer, RecordingBuffer(), **options)


def test_actor_adds_steps_from_several_servers():
    handles, nodes = served(InProcess(), *[functools.partial(async_envs, 2, 2)] * 2)
    actor = make_actor(handles, deadline=DEADLINE)
    logs = [actor.step() for _ in range(24)]
    assert actor.num_envs == 4
    ended = [each for each in logs if each]
    assert ended and all(each == {"episode_return": 3.0, "episode_length": 3.0, "episodes": 2} for each in ended)
    ids = np.concatenate([env_ids for env_ids, _ in actor._replay.writer.steps])
    assert set(ids.tolist()) == {0, 1, 2, 3}
    actor.close()
    for node in nodes:
        node.stop()


class Slow(CountingEnv):
    """An environment whose step waits until the test sets the event `gate`."""

    gate = threading.Event()

    def step(self, action):
        assert self.gate.wait(DEADLINE)
        return super().step(action)


def test_slow_server_does_not_delay_a_fast_server():
    Slow.gate.clear()
    handles, nodes = served(InProcess(), functools.partial(async_envs, 1, 1, Slow), functools.partial(async_envs, 1, 1))
    pool = as_pool(handles)
    begun = set()
    while begun != {0, 1}:  # the fast server can answer twice before the slow server starts a step
        begun.add(pool_step(pool))
    assert [pool_step(pool) for _ in range(5)] == [1] * 5
    Slow.gate.set()
    while pool_step(pool) != 0:
        pass
    for node in nodes:
        node.stop()


def pool_step(pool):
    (env_id,), _ = pool.recv()
    pool.send([env_id], np.zeros(1, np.int32))
    return int(env_id)


@pytest.mark.parametrize(
    ("ids", "actions", "message"),
    [
        ([0, 1], [0], r"an action for each of them.*ids of shape \(2,\).*actions of shape \(1,\)"),
        ([0], [0, 0], "an action for each of them"),
        ([0, 0], [0, 0], "environment 0, which is still stepping, unknown or listed twice"),
        ([7], [0], "environment 7, which is still stepping, unknown"),
        ([2], [0], "environment 2, which is still stepping, unknown"),
        ([0.0], [0], "got ids of shape"),
        ([0], [0.5], "action.*float"),
        ([0], [9], "action"),
    ],
)
def test_invalid_actions_are_refused_and_the_server_continues(ids, actions, message):
    handles, nodes = served(InProcess(), functools.partial(async_envs, 2, 2), functools.partial(async_envs, 2, 2))
    pool = as_pool(handles)
    first, _ = pool.recv()
    if sorted(first.tolist()) != [0, 1]:  # the second server has answered first
        pool.send(first, np.zeros(2, np.int32))
        while sorted(first.tolist()) != [0, 1]:
            first, _ = pool.recv()
            if sorted(first.tolist()) != [0, 1]:
                pool.send(first, np.zeros(2, np.int32))
    with pytest.raises(UsageError, match=message):
        pool.send(ids, np.asarray(actions))
    pool.send([0, 1], np.zeros(2, np.int32))
    seen = set()
    while seen != {(0, 1), (2, 3)}:  # on a busy machine, one server can answer many times before the other
        seen.add(pool_of_two(pool))
    for node in nodes:
        node.stop()


def pool_of_two(pool):
    env_ids, _ = pool.recv()
    pool.send(env_ids, np.zeros(2, np.int32))
    return tuple(sorted(env_ids.tolist()))


def test_recv_without_stepping_environments_is_refused():
    handles, nodes = served(InProcess(), functools.partial(async_envs, 2, 2))
    pool = as_pool(handles[0])
    pool.recv()
    with pytest.raises(UsageError, match=r"call send\(\) for the received environments first"):
        pool.recv()
    nodes[0].stop()


def test_repeated_call_does_not_step_again():
    server = EnvServer(functools.partial(async_envs, 1, 1))
    server.reset("a", 1)
    first = server.recv("a", 2)
    assert server.recv("a", 2) is first and first.timestep.step_type.tolist() == [FIRST]
    action = np.zeros(1, np.int32)
    for _ in range(3):
        server.send("a", 3, np.zeros(1, np.int32), action)
    second = server.recv("a", 4)
    assert second.timestep.step_type.tolist() == [MID] and second.timestep.observation[0, 0] == 1
    assert server.recv("a", 2) is None  # repeat an old call
    server._env.close()


def test_new_actor_gets_first_timesteps_and_calls_of_the_previous_actor_raise():
    handles, nodes = served(InProcess(), async_envs)
    before, after = (as_pool(handles[0]) for _ in range(2))
    play(before, 7)
    kinds = [kind for each in play(after, 6).values() for kind, _ in each[:1]]
    assert kinds == [FIRST] * 3
    with pytest.raises(EnvError, match="another Actor has reset its environments"):
        play(before, 2)
    nodes[0].stop()


def test_second_actor_is_refused_if_the_server_has_a_pool_instead_of_a_builder():
    pool = async_envs()
    handles, nodes = served(InProcess(), pool)
    play(as_pool(handles[0]), 2)
    with pytest.raises(EnvError, match="an env_builder that returns the pool, instead of the pool"):
        as_pool(handles[0]).recv()
    nodes[0].stop()
    pool.close()


class Breaks(CountingEnv):
    def step(self, action):
        raise ZeroDivisionError("the simulator fell over")


def test_environment_error_reaches_the_actor():
    handles, nodes = served(InProcess(), functools.partial(async_envs, 2, 2, Breaks))
    actor = make_actor(handles[0])
    with pytest.raises(EnvError, match="raised ZeroDivisionError in step.*the simulator fell over"):
        for _ in range(3):
            actor.step()
    actor.close()
    nodes[0].stop()


@pytest.mark.parametrize("victim", [0, 1])
def test_pool_raises_within_the_deadline_if_a_server_stops(victim):
    handles, nodes = served(InProcess(), *[functools.partial(async_envs, 2, 2)] * 2)
    pool = as_pool(handles, deadline=1.0)
    play(pool, 4)
    nodes[victim].stop()
    address = nodes[victim].address
    with pytest.raises(PeerError, match=rf"The EnvServer at {address} did not answer (recv|send)\(\) within 1 s"):
        play(pool, 100_000)
    nodes[1 - victim].stop()


def serve_until_killed(address):
    methods = public_methods(EnvServer(async_envs))
    SocketTransport().serve(methods, address)
    threading.Event().wait()


@pytest.mark.system
def test_pool_raises_if_the_server_process_is_killed(tmp_path):
    context = multiprocessing.get_context("spawn")
    address = str(tmp_path / "envs")
    child = context.Process(target=serve_until_killed, args=(address,))
    child.start()
    pool = as_pool(Remote([address], "EnvServer", DEADLINE, None, SocketTransport()), deadline=20.0)
    play(pool, 10)
    child.kill()
    child.join()
    with pytest.raises(PeerError, match="The EnvServer at .* did not answer"):
        play(pool, 10)


def test_servers_with_different_specs_or_sync_pools_are_refused():
    handles, nodes = served(InProcess(), async_envs, functools.partial(SyncEnv, CountingEnv, 2))
    with pytest.raises(UsageError, match="only if each serves an AsyncEnv"):
        as_pool(handles)
    others, more = served(InProcess(), functools.partial(async_envs, 3, 1))
    with pytest.raises(UsageError, match="equal specs and wait_num"):
        as_pool([handles[0], *others])
    for node in (*nodes, *more):
        node.stop()
