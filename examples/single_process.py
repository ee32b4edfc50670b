"""PPO on CartPole in one process, from the parts: what `rlframe train` does, without its logs and checkpoints."""

from rlframe import Actor, Evaluator, Inferencer, InferencerConfig, Learner, LearnerConfig, ReplayBuffer, SyncEnv
from rlframe.agents import PPO, PPOConfig

NUM_ENVS = 8
ENV_STEPS = 100_000

config = PPOConfig(  # the settings of rl-baselines3-zoo
    unroll_length=32,
    num_epochs=20,
    num_minibatches=1,
    discount=0.98,
    gae_lambda=0.8,
    learning_rate=1e-3,
    anneal_learning_rate=True,
    anneal_clip=True,
    total_learner_steps=ENV_STEPS // (32 * NUM_ENVS),
)


def env_builder(seed):
    return SyncEnv("CartPole-v1", NUM_ENVS, "envpool", seed=seed)


env = env_builder(seed=1)
agent = PPO(config, env.observation_spec, env.action_spec)
replay_buffer = ReplayBuffer(agent)
learner = Learner(LearnerConfig(seed=1), agent, replay_buffer)
inferencer = Inferencer(InferencerConfig(), agent, learner)
actor = Actor(env, inferencer, replay_buffer)

while actor.env_steps < ENV_STEPS:
    for _ in range(config.unroll_length):
        actor.step()
    logs = learner.step(replay_buffer.sample())
    if learner.learner_steps % 40 == 0:
        print(f"{actor.env_steps:7} steps  {actor.episodes:5} episodes  loss {float(logs['loss']):.3f}")

evaluator = Evaluator(env_builder, Inferencer(InferencerConfig(greedy=True), agent, learner), episodes=20)
print(f"return {evaluator.evaluate()['return_mean']:.1f} over 20 episodes")
evaluator.close()
actor.close()
