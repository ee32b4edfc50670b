"""An Actor steps the environments of an `EnvServer` in another process, with the same results as local environments."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from rlframe import Actor, EnvServer, Inferencer, InferencerConfig, SyncEnv
from rlframe.envs import as_pool
from rlframe.errors import EnvError, PeerError, UsageError
from rlframe.handles import Remote
from rlframe.types import FIRST, LAST, MID
from tests.fakes import ACTION_SPEC, OBSERVATION_SPEC, CountingEnv, FixedParams, RecordingBuffer, counting_agent
from tests.in_process import InProcess
from tests.ports import free_address


def two_envs():
    return SyncEnv(CountingEnv, 2, "loop", clip_rewards=0.5)


def served(server, deadline=5.0):
    """Serve an EnvServer in this process. Return a handle to its node, and the node."""
    methods = {name: getattr(server, name) for name in ("specs", "reset", "step")}
    node = InProcess().serve(methods)
    return Remote([node.address], "EnvServer", deadline, None, InProcess()), node


def make_actor(env, **options):
    inferencer = Inferencer(InferencerConfig(), counting_agent(), FixedParams({"w": np.float32(0.5)}))
    return Actor(env, inferencer, RecordingBuffer(), **options)


def test_actor_adds_the_same_steps_for_remote_and_local_environments():
    handle, node = served(EnvServer(two_envs))
    actors = [make_actor(env) for env in (two_envs, handle)]
    logs = [[actor.step() for _ in range(9)] for actor in actors]
    assert logs[0] == logs[1] and logs[1][2] == {"episode_return": 3.0, "episode_length": 3.0, "episodes": 2}
    ours, theirs = (actor._replay.writer.steps for actor in actors)
    for (env_ids, step), (their_ids, their_step) in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(env_ids, their_ids)
        np.testing.assert_array_equal(step.next_timestep.observation, their_step.next_timestep.observation)
        np.testing.assert_array_equal(their_step.next_timestep.reward, 0.5 * (step.next_timestep.step_type != FIRST))
    assert actors[1].num_envs == 2 and actors[1].get_state()["env"] is None
    actors[1].close()
    node.stop()


def test_served_environments_and_pools_have_their_specs():
    for builder, size in ((CountingEnv, 1), (two_envs, 2)):
        handle, node = served(EnvServer(builder))
        pool = as_pool(handle)
        assert (pool.num_envs, pool.is_sync) == (size, True)
        assert pool.observation_spec.shape == OBSERVATION_SPEC.shape
        assert pool.action_spec.num_values == ACTION_SPEC.num_values
        types = [pool.reset().step_type, *(pool.step(np.zeros(size, np.int32)).step_type for _ in range(4))]
        assert [each.tolist() for each in types] == [[kind] * size for kind in (FIRST, MID, MID, LAST, FIRST)]
        node.stop()


def test_repeated_call_does_not_step_again():
    server = EnvServer(two_envs)
    actions = np.zeros(2, np.int32)
    server.reset("a", 1)
    first = server.step("a", 2, actions)
    again = server.step("a", 2, actions)
    assert again is first and first.timestep.observation[0, 0] == 1
    assert server.step("a", 3, actions).timestep.observation[0, 0] == 2
    assert server.step("a", 2, actions) is None  # repeat an old call
    assert server.step("a", 4, actions).timestep.observation[0, 0] == 3


def test_only_the_actor_that_reset_last_may_step():
    handle, node = served(EnvServer(two_envs))
    pools = [as_pool(handle), as_pool(handle)]
    for pool in pools:
        pool.reset()
    with pytest.raises(EnvError, match="another Actor has reset its environments"):
        pools[0].step(np.zeros(2, np.int32))
    assert pools[1].step(np.zeros(2, np.int32)).step_type.tolist() == [MID, MID]
    node.stop()


class Breaks(CountingEnv):
    def step(self, action):
        raise ZeroDivisionError("the simulator fell over")


def test_environment_error_reaches_the_actor_and_ends_the_server():
    server = EnvServer(Breaks)
    handle, node = served(server)
    raised = []

    def run():
        try:
            server.run()
        except EnvError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    actor = make_actor(handle)
    with pytest.raises(EnvError, match="Environment 0 raised ZeroDivisionError in step.*the simulator fell over"):
        actor.step()
    thread.join(30.0)
    assert len(raised) == 1 and "the simulator fell over" in str(raised[0])
    node.stop()


def test_invalid_actions_are_refused_and_the_server_continues():
    server = EnvServer(two_envs)
    handle, node = served(server)
    pool = as_pool(handle)
    pool.reset()
    with pytest.raises(UsageError, match="action"):
        pool.step(np.zeros((2, 7), np.float32))
    assert pool.step(np.zeros(2, np.int32)).step_type.tolist() == [MID, MID]
    node.stop()
    assert not server._stop.is_set()


def test_actor_raises_within_the_deadline_if_there_is_no_server():
    handle = Remote(["nobody"], "EnvServer", 1.0, None, InProcess())
    with pytest.raises(PeerError, match=r"The EnvServer at nobody did not answer specs\(\) within 1 s"):
        make_actor(handle, deadline=1.0)


def test_handle_cannot_be_used_for_several_pools():
    handle, node = served(EnvServer(two_envs))
    with pytest.raises(UsageError, match="num_pools=2 needs an env_builder that can be called"):
        make_actor(handle, num_pools=2)
    node.stop()


@pytest.mark.system
def test_actor_steps_environments_of_another_process_and_raises_after_this_process_restarts():
    from tests.serving import CHILD_DEADLINE, Child, client, running

    address = free_address()
    child = Child(address, EnvServer, two_envs)
    actor = None
    try:
        actor = make_actor(client(address), deadline=CHILD_DEADLINE)
        logs = [actor.step() for _ in range(7)]
        assert [each for each in logs if each] == [{"episode_return": 3.0, "episode_length": 3.0, "episodes": 2}] * 2
        child.kill()
        child.close()
        child = Child(address, EnvServer, two_envs)
        with pytest.raises(EnvError, match="This EnvServer was restarted"), running(actor):
            actor._stop.wait(CHILD_DEADLINE)
    finally:
        child.close()
        if actor is not None:
            actor.close()
