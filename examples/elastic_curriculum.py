"""A custom commander: `python examples/elastic_curriculum.py`.

DQN learns CartPole while gravity increases in three stages. Each collector explores with a different epsilon. The
commander sets gravity and epsilon through the overrides of a task. Events and `/status` show the overrides.
"""

import functools
import sys
import tempfile

import gymnasium

from rlframe import Actor, Evaluator, Inferencer, InferencerConfig, LearnerConfig, SharedMemReplayBuffer, SyncEnv
from rlframe.agents import DQN
from rlframe.coordinator import (
    CollectorWorker,
    Coordinator,
    CoordinatorConfig,
    EvaluatorWorker,
    LearnerWorker,
    LocalOperator,
    ParamStore,
    StartTask,
    TrainOne,
)
from rlframe.programs import make_experiment

STEPS = 30_000
GRAVITIES = (9.8, 12.0, 15.0)  # each for a third of the steps; evaluations use the last one
EPSILONS = (0.02, 0.2)  # one per collector

preset = make_experiment("dqn", "CartPole-v1", preset="dqn/cartpole", steps=STEPS)


class Curriculum(TrainOne):
    def task(self, role, index, view):
        if role == "learner":
            return StartTask("learn", self.policy_id, overrides={"policy": {"learning_rate": 1e-3}})
        stage = min(view.env_steps * len(GRAVITIES) // STEPS, len(GRAVITIES) - 1)
        overrides = {"env": {"gravity": GRAVITIES[stage]}, "collector": {"epsilon": EPSILONS[index]}}
        return StartTask("collect", self.policy_id, overrides=overrides)


def make_env(gravity=GRAVITIES[-1]):
    env = gymnasium.make("CartPole-v1")
    env.unwrapped.gravity = gravity
    return env


def env_builder(seed, env_kwargs=None):
    return SyncEnv(make_env, 4, "loop", seed=seed, env_kwargs=env_kwargs)


def make_actor(replay_buffer, inferencer, rank, env_kwargs=None):
    return Actor(functools.partial(env_builder, env_kwargs=env_kwargs), inferencer, replay_buffer, rank)


def make_evaluator(agent, learner):
    return Evaluator(env_builder, Inferencer(InferencerConfig(greedy=True), agent, learner), episodes=8)


def main(directory):
    env = env_builder(seed=1)
    agent = DQN(preset.agent_config, env.observation_spec, env.action_spec)
    env.close()
    replay_buffer = SharedMemReplayBuffer(agent, num_writers=len(EPSILONS), elastic_writers=True)
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
        Curriculum(env_steps=STEPS),
        LocalOperator(workers),
        replay_buffer,
        param_store,
        CoordinatorConfig(directory, collectors=len(EPSILONS), max_collectors=len(EPSILONS)),
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
