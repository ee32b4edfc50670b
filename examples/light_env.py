"""DQN on CartPole in five processes, for environments that are cheap: `python examples/light_env.py`.

A learner, one inferencer that answers for two actors in batches, and an evaluator; replay is in shared memory.
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
from rlframe.agents import DQN, DQNConfig
from rlframe.agents.networks import MLPConfig

NUM_ACTORS = 2
LEARNER_STEPS = 20_000

network = MLPConfig(hidden=(128, 128), activation="relu")
config = DQNConfig(  # those of the preset dqn/cartpole
    discount=0.995,
    learning_rate=1e-3,
    anneal_learning_rate=True,
    batch_size=64,
    replay_capacity=100_000,
    min_replay_size=1_000,
    update_period=2,
    target_update_period=300,
    epsilon_decay_steps=8_000,
    epsilon_end=0.04,
    optimiser="adam",
    max_grad_norm=0.5,
    n_step=3,
    double=True,
    total_learner_steps=LEARNER_STEPS,
)


def env_builder(seed):
    return SyncEnv("CartPole-v1", 8, "loop", seed=seed)


def evaluate(agent, learner):
    """Plays with the newest parameters until the program ends."""
    evaluator = Evaluator(env_builder, Inferencer(InferencerConfig(greedy=True), agent, learner), episodes=8)
    while not lp.wait_for_stop(1.0):
        result = evaluator.evaluate()
        print(f"return {result['return_mean']:5.1f} after {result['params_version'] - 1} updates")
    evaluator.close()


def make_program():
    env = env_builder(seed=1)
    agent = DQN(config, env.observation_spec, env.action_spec, network)
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
            program.add_node(lp.CourierNode(Actor, env_builder, inferencer, replay_buffer, num_pools=2))
    with program.group("evaluator"):
        program.add_node(lp.PyNode(evaluate, agent, learner))
    return program, replay_buffer  # whose memory goes when nothing holds it any more


if __name__ == "__main__":
    program, replay_buffer = make_program()
    lp.launch(program, launch_type="local_mp", terminal="current_terminal").wait()
