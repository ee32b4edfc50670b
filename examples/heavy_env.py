"""IMPALA on CartPole in four processes, for slow environments: `python examples/heavy_env.py`.

Four processes: a learner, two actors with one inferencer each, and an evaluator. The replay buffer is in shared memory.
"""

import launchpad as lp

from rlframe import (
    Actor,
    Evaluator,
    Inferencer,
    InferencerConfig,
    Learner,
    LearnerConfig,
    SharedMemReplayBuffer,
    SyncEnv,
)
from rlframe.agents import IMPALA
from rlframe.programs import make_experiment

NUM_ACTORS = 2
LEARNER_STEPS = 3_750  # each from 8 unrolls of 10 steps, which gives the 300,000 steps of the preset

preset = make_experiment("impala", "CartPole-v1", preset="impala/cartpole", total_learner_steps=LEARNER_STEPS)


def env_builder(seed):
    return SyncEnv("CartPole-v1", 8, "loop", seed=seed)


def evaluate(agent, learner):
    """Evaluate the newest parameters until the program ends."""
    evaluator = Evaluator(env_builder, Inferencer(InferencerConfig(greedy=True), agent, learner), episodes=8)
    while not lp.wait_for_stop(1.0):
        result = evaluator.evaluate()
        print(f"return {result['return_mean']:5.1f} after {result['params_version'] - 1} updates")
    evaluator.close()


def make_program():
    env = env_builder(seed=1)
    agent = IMPALA(preset.agent_config, env.observation_spec, env.action_spec)
    env.close()
    replay_buffer = SharedMemReplayBuffer(agent, num_writers=NUM_ACTORS)
    program = lp.Program("heavy_env")
    with program.group("learner"):
        learner_cfg = LearnerConfig(max_learner_steps=LEARNER_STEPS)
        learner = program.add_node(lp.CourierNode(Learner, learner_cfg, agent, replay_buffer))
    with program.group("actor"):
        for _ in range(NUM_ACTORS):
            inferencer = Inferencer(InferencerConfig(), agent, learner)
            program.add_node(lp.CourierNode(Actor, env_builder, inferencer, replay_buffer))
    with program.group("evaluator"):
        program.add_node(lp.PyNode(evaluate, agent, learner))
    return program, replay_buffer  # keep a reference to the replay buffer, or its memory is freed


if __name__ == "__main__":
    program, replay_buffer = make_program()
    lp.launch(program, launch_type="local_mp", terminal="current_terminal").wait()
