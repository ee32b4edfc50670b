"""IMPALA on CartPole in a cluster: the program of the coordinator's Pod. See README.md beside it.

What it trains is in the upper half: change that. The Pod holds the coordinator, its control API and the replay (a
Reverb server, saved to the volume); learner, collectors and evaluator are Pods that it has made, and that mount the
same volume. A Pod that takes this one's place goes on with all of it.
"""

import argparse
import functools
import math
import os
import pathlib
import signal
import threading

from rlframe import Actor, Evaluator, Inferencer, InferencerConfig, LearnerConfig, SyncEnv
from rlframe.agents import IMPALA, IMPALAConfig
from rlframe.coordinator import (
    CollectorWorker,
    Coordinator,
    CoordinatorConfig,
    FileParamStore,
    LearnerWorker,
    TrainOne,
    save_workers,
)
from rlframe.errors import JobFailedError

ENVS = 8  # of each collector
AWAY = 600.0  # seconds that workers wait for this Pod, which may have to move to another node

config = IMPALAConfig(  # those of the preset impala/cartpole
    unroll_length=10,
    batch_size=8,
    vtrace_lambda=0.95,
    optimizer="adam",
    learning_rate=2e-3,
    max_grad_norm=None,
    total_learner_steps=2_500,
)


def env_builder(seed):
    return SyncEnv("CartPole-v1", ENVS, "loop", seed=seed)


def make_agent():
    env = env_builder(seed=1)
    agent = IMPALA(config, env.observation_spec, env.action_spec)
    env.close()
    return agent


def make_actor(replay_buffer, inferencer, rank):
    return Actor(env_builder, inferencer, replay_buffer, rank)


def make_evaluator(agent, learner):
    return Evaluator(env_builder, Inferencer(InferencerConfig(greedy=True), agent, learner), episodes=8)


# From here on it is the same for any agent.


def main(options):
    from rlframe.coordinator.control.serving import serve_control
    from rlframe.coordinator.operators.kubernetes import KubernetesConfig, KubernetesOperator, load_templates
    from rlframe.replay.reverb import ReverbReplayBuffer

    told_to_end = threading.Event()
    # Not an exception in whatever goes on: process 1 of a container has to do it itself, and is given a minute.
    signal.signal(signal.SIGTERM, lambda *_: told_to_end.set())
    agent = make_agent()
    port = int(options.replay.rpartition(":")[2])
    save_replay = serve_replay(agent, port, options.directory / "reverb")
    replay_buffer = ReverbReplayBuffer(agent, options.replay, timeout=AWAY)  # the workers'
    param_store = FileParamStore(options.directory / "params")
    learner_cfg = LearnerConfig(checkpoint_dir=str(options.directory / "checkpoints"), resume=True)
    state_dir = str(options.directory / "coordinator")
    save_workers(
        state_dir,
        {
            "learner": functools.partial(LearnerWorker, learner_cfg, agent, replay_buffer, param_store),
            "collector": functools.partial(
                CollectorWorker, functools.partial(make_actor, replay_buffer), agent, param_store
            ),
            "evaluator": functools.partial(CollectorWorker, None, agent, param_store, evaluations=make_evaluator),
        },
    )
    pods = KubernetesConfig(
        run=options.run,
        namespace=os.environ["POD_NAMESPACE"],
        state_dir=state_dir,
        templates=load_templates(options.templates),
        owner_pod=os.environ["POD_NAME"],
        silence=AWAY,
    )
    coordinator = Coordinator(
        TrainOne(learner_steps=options.learner_steps, eval_every=50_000),
        KubernetesOperator(pods),
        ReverbReplayBuffer(agent, f"localhost:{port}"),
        param_store,
        CoordinatorConfig(
            state_dir,
            job_id=options.run,
            collectors=options.collectors,
            max_collectors=options.max_collectors,
            describes={
                "id": options.run,
                "agent": "impala",
                "env": "CartPole-v1",
                "run_dir": str(options.directory),
            },
        ),
    )
    with serve_control(coordinator, options.host, options.control_port, str(options.token_file)) as control:
        print(f"control: {control.url}", flush=True)
        threading.Thread(target=run, args=(coordinator,), daemon=True).start()
        told_to_end.wait()  # when the job is over too: a StatefulSet's Pod that ends is started again
        save_replay()
    # Not `coordinator.close()`: the job goes on, by the Pod that comes next. Nor what else ends with an interpreter.
    os._exit(0)


def run(coordinator):
    """The job, from where the journal ends to its end; its last status is served from then on."""
    try:
        coordinator.run()
    except JobFailedError as error:
        print(error, flush=True)
    except BaseException:
        import traceback

        traceback.print_exc()
        os._exit(1)  # nobody runs the job any more: Kubernetes starts the container again
    else:
        print(f"The job is over: {coordinator.status()['job']['reason']}", flush=True)


def serve_replay(agent, port, directory):
    """A Reverb server, which goes on from what was saved. Returns what saves it at the end."""
    from rlframe.engines.launching.reverb_server import ReverbServer
    from rlframe.replay.reverb import ReverbReplayBuffer

    tables = ReverbReplayBuffer.tables(agent, block=ENVS if agent.replay_spec.kind == "queue" else 1)
    server = ReverbServer(tables, directory, port, at_end=math.inf)
    saving = threading.Thread(target=server.run, daemon=True)
    saving.start()

    def end():
        server.stop()
        saving.join()

    return end


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", default="train", help="its name: that of the labels in workers.yaml")
    parser.add_argument(
        "--directory", type=pathlib.Path, default="/rlframe", help="on the volume, as every Pod mounts it"
    )
    parser.add_argument("--templates", default="/etc/rlframe/workers", help="ROLE.yaml of the workers' Pods")
    parser.add_argument("--token-file", type=pathlib.Path, default="/etc/rlframe/token/token", help="of the control")
    parser.add_argument("--replay", default="rlframe-coordinator:7500", help="HOST:PORT by which Pods reach this one")
    parser.add_argument("--host", default="0.0.0.0", help="address that the control listens at")
    parser.add_argument("--control-port", type=int, default=8080)
    parser.add_argument("--learner-steps", type=int, default=config.total_learner_steps)
    parser.add_argument("--collectors", type=int, default=2, help="to begin with")
    parser.add_argument("--max-collectors", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
