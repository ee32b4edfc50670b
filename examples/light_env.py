"""DQN on CartPole in five processes, for fast environments: `python examples/light_env.py`.

Five processes: a learner, an inferencer, two actors and an evaluator. The inferencer computes the actions of both
actors in batches. The replay buffer is in shared memory.
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
from rlframe.agents import DQN
from rlframe.programs import make_experiment

NUM_ACTORS = 2
NUM_POOLS = 2  # per actor: one pool steps while the inferencer computes the actions of the other
LEARNER_STEPS = 40_000

preset = make_experiment("dqn", "CartPole-v1", preset="dqn/cartpole", total_learner_steps=LEARNER_STEPS)


def env_builder(seed):
    return SyncEnv("CartPole-v1", preset.num_envs // (NUM_ACTORS * NUM_POOLS), "loop", seed=seed)


def evaluate(agent, learner):
    """Evaluate the newest parameters until the program ends."""
    evaluator = Evaluator(env_builder, Inferencer(InferencerConfig(greedy=True), agent, learner), episodes=8)
    while not lp.wait_for_stop(1.0):
        result = evaluator.evaluate()
        print(f"return {result['return_mean']:5.1f} after {result['params_version'] - 1} updates")
    evaluator.close()


def make_program():
    env = env_builder(seed=1)
    agent = DQN(preset.agent_config, env.observation_spec, env.action_spec, preset.topology_config.network_config)
    env.close()
    replay_buffer = SharedMemReplayBuffer(agent, num_writers=NUM_ACTORS)
    program = lp.Program("light_env")
    with program.group("learner"):
        learner_cfg = LearnerConfig(max_learner_steps=LEARNER_STEPS)
        learner = program.add_node(lp.CourierNode(Learner, learner_cfg, agent, replay_buffer))
    with program.group("inferencer"):
        inferencer = program.add_node(lp.CourierNode(Inferencer, InferencerConfig(), agent, learner))
    with program.group("actor"):
        for _ in range(NUM_ACTORS):
            program.add_node(lp.CourierNode(Actor, env_builder, inferencer, replay_buffer, num_pools=NUM_POOLS))
    with program.group("evaluator"):
        program.add_node(lp.PyNode(evaluate, agent, learner))
    return program, replay_buffer  # keep a reference to the replay buffer, or its memory is freed


if __name__ == "__main__":
    program, replay_buffer = make_program()
    lp.launch(program, launch_type="local_mp", terminal="current_terminal").wait()
