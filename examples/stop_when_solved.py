"""Train until CartPole is solved, then load the policy, act and evaluate: `python stop_when_solved.py [TOPOLOGY]`."""

import sys

import gymnasium

import rlframe

returns = []  # mean return of each evaluation


def stop_when_solved(info):
    if "return_mean" in info.values:
        returns.append(info.values["return_mean"])
        if len(returns) >= 2 and min(returns[-2:]) >= 475:  # a single good evaluation may be luck
            info.stop()


topology = sys.argv[1] if len(sys.argv) > 1 else "single_process"  # or heavy_env, light_env, distributed, elastic
result = rlframe.train("ppo", "CartPole-v1", topology=topology, eval_every=10_000, callbacks=[stop_when_solved])
print(f"stopped by {result.stopped_by} after {result.env_steps} steps: return {result.return_mean}")

policy = rlframe.load(result.run_dir)
env = gymnasium.make("CartPole-v1")
observation, _ = env.reset(seed=0)
print("first action:", env.action_space.contains(policy.act(observation)))

played = rlframe.evaluate(result.run_dir, episodes=20)
print(f"return {played['return_mean']:.1f} over 20 episodes")
