"""PPO on CartPole in one process: the loop of `rlframe train`, without logs and checkpoints."""

from rlframe import Actor, Evaluator, Inferencer, InferencerConfig, Learner, LearnerConfig, ReplayBuffer, SyncEnv
from rlframe.agents import PPO
from rlframe.programs import make_experiment

LEARNER_STEPS = 390  # 100,000 environment steps

preset = make_experiment("ppo", "CartPole-v1", preset="ppo/cartpole", total_learner_steps=LEARNER_STEPS)


def env_builder(seed):
    return SyncEnv("CartPole-v1", preset.num_envs, "envpool", seed=seed)


env = env_builder(seed=1)
agent = PPO(preset.agent_config, env.observation_spec, env.action_spec)
replay_buffer = ReplayBuffer(agent)
learner = Learner(LearnerConfig(seed=1), agent, replay_buffer)
inferencer = Inferencer(InferencerConfig(), agent, learner)
actor = Actor(env, inferencer, replay_buffer)

while learner.learner_steps < LEARNER_STEPS:
    for _ in range(preset.agent_config.unroll_length):
        actor.step()
    logs = learner.step(replay_buffer.sample())
    if learner.learner_steps % 40 == 0:
        print(f"{actor.env_steps:7} steps  {actor.episodes:5} episodes  loss {float(logs['loss']):.3f}")

evaluator = Evaluator(env_builder, Inferencer(InferencerConfig(greedy=True), agent, learner), episodes=20)
print(f"return {evaluator.evaluate()['return_mean']:.1f} over 20 episodes")
evaluator.close()
actor.close()
