"""IMPALA on CartPole with a Reverb server, for programs on several machines: `python examples/distributed.py`.

Six processes: a Reverb server, a learner, an inference service, two actors and an evaluator.
"""

import launchpad as lp

from rlframe import (
    Actor,
    Evaluator,
    Inferencer,
    InferencerConfig,
    Learner,
    LearnerConfig,
    ReverbReplayBuffer,
    SyncEnv,
)
from rlframe.agents import IMPALA
from rlframe.programs import make_experiment

NUM_ACTORS = 2
NUM_ENVS = 8
LEARNER_STEPS = 3_750  # each from 8 unrolls of 10 steps, which gives the 300,000 steps of the preset

preset = make_experiment("impala", "CartPole-v1", preset="impala/cartpole", total_learner_steps=LEARNER_STEPS)


def env_builder(seed):
    return SyncEnv("CartPole-v1", NUM_ENVS, "loop", seed=seed)


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
    program = lp.Program("distributed")
    with program.group("replay"):
        # All environments of an actor complete their unrolls at the same step, so one item holds all of these unrolls.
        replay = program.add_node(lp.ReverbNode(ReverbReplayBuffer.tables(agent, block=NUM_ENVS)))
    with program.group("learner"):
        learner_cfg = LearnerConfig(max_learner_steps=LEARNER_STEPS)
        learner = program.add_node(lp.CourierNode(Learner, learner_cfg, agent, replay))
    with program.group("inferencer"):
        inferencer = program.add_node(lp.CourierNode(Inferencer, InferencerConfig(), agent, learner))
    with program.group("actor"):
        for _ in range(NUM_ACTORS):
            program.add_node(lp.CourierNode(Actor, env_builder, inferencer, replay))
    with program.group("evaluator"):
        program.add_node(lp.PyNode(evaluate, agent, learner))
    return program


if __name__ == "__main__":
    lp.launch(make_program(), launch_type="local_mp", terminal="current_terminal").wait()
