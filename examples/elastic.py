"""IMPALA on CartPole with a coordinator: `python examples/elastic.py`.

The learner, the two collectors and the evaluator are processes. You can kill each of them during the run:

    pkill -9 -f 'rlframe: collector 1'
"""

import functools
import sys
import tempfile

from rlframe import Actor, Evaluator, Inferencer, InferencerConfig, LearnerConfig, SharedMemReplayBuffer, SyncEnv
from rlframe.agents import IMPALA
from rlframe.coordinator import (
    CollectorWorker,
    Coordinator,
    CoordinatorConfig,
    EvaluatorWorker,
    LearnerWorker,
    LocalOperator,
    ParamStore,
    TrainOne,
)
from rlframe.programs import make_experiment

NUM_COLLECTORS = 2
LEARNER_STEPS = 3_750  # each from 8 unrolls of 10 steps, which gives the 300,000 steps of the preset

preset = make_experiment("impala", "CartPole-v1", preset="impala/cartpole", total_learner_steps=LEARNER_STEPS)


def env_builder(seed):
    return SyncEnv("CartPole-v1", 8, "loop", seed=seed)


def make_actor(replay_buffer, inferencer, rank):
    return Actor(env_builder, inferencer, replay_buffer, rank)


def make_evaluator(agent, learner):
    return Evaluator(env_builder, Inferencer(InferencerConfig(greedy=True), agent, learner), episodes=8)


def main(directory):
    env = env_builder(seed=1)
    agent = IMPALA(preset.agent_config, env.observation_spec, env.action_spec)
    env.close()
    replay_buffer = SharedMemReplayBuffer(agent, num_writers=NUM_COLLECTORS, elastic_writers=True)
    param_store = ParamStore()
    learner_cfg = LearnerConfig(checkpoint_dir=f"{directory}/checkpoints", resume=True)
    workers = {
        "learner": functools.partial(LearnerWorker, learner_cfg, agent, replay_buffer, param_store),
        "collector": functools.partial(
            CollectorWorker, functools.partial(make_actor, replay_buffer), agent, param_store
        ),
        "evaluator": functools.partial(EvaluatorWorker, make_evaluator, agent, param_store),
    }
    coordinator = Coordinator(
        TrainOne(learner_steps=LEARNER_STEPS, eval_every=50_000),
        LocalOperator(workers),
        replay_buffer,
        param_store,
        CoordinatorConfig(directory, collectors=NUM_COLLECTORS, max_collectors=NUM_COLLECTORS),
    )
    number = 0
    try:
        coordinator.submit()
        while not coordinator.wait(0.2):
            for event in coordinator.events(since=number):
                number = event["number"]
                print(event["text"])
    finally:
        coordinator.close()
        replay_buffer.close()
        param_store.close()
    job = coordinator.status()["job"]
    if job["state"] == "FAILED":
        print(f"The job failed: {job['reason']}", file=sys.stderr)
        return 1
    print(f"return {job['eval_return']:.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tempfile.mkdtemp(prefix="rlframe-")))
