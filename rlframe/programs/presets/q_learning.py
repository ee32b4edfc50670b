"""Presets of agents that learn action values: DQN, R2D2, PQN, SAC and TD3.

The configs' defaults come from the papers. These values make the agents learn fast.
"""

from __future__ import annotations

from rlframe.programs.presets.table import (
    ATARI,
    ATARI_EVALUATION,
    ATARI_TRAINING,
    MINATAR,
    MUJOCO,
    Preset,
    settings,
)

# --- DQN

ZOO = "rl-baselines3-zoo, hyperparams/dqn.yml"
SB3 = "stable-baselines3, default of DQN"
RAINBOW = "Hessel et al. 2018 (Rainbow), table 1"
CLEANRL_ATARI = "CleanRL, dqn_atari_jax.py"
DOPAMINE_CARTPOLE = "Dopamine, jax/agents/dqn/configs/dqn_cartpole.gin"

# The zoo and CleanRL count exploration and target updates in environment steps. Their exploration starts at the start
# of the run, and its length is a share of the run.
FROM_FIRST_UPDATE = ", which counts from the start of the run; rlframe counts from the first update"

CARTPOLE = Preset(
    name="dqn/cartpole",
    envs=("CartPole-v[01]",),
    fields={
        **settings(
            f"{ZOO}, CartPole-v1",
            agent__batch_size=64,
            agent__replay_capacity=100_000,
            agent__min_replay_size=1_000,
            agent__update_period=2,  # 128 updates every 256 steps
        ),
        # in the zoo, exploration ends after 0.16 of 50,000 steps: 8,000 steps, or 4,000 updates
        **settings(f"{ZOO}, CartPole-v1{FROM_FIRST_UPDATE}", agent__epsilon="linear:1:0.04@4000"),
        **settings(SB3, network="mlp", network__activation="relu", agent__optimizer="adam"),
        **settings(RAINBOW, agent__n_step=3, agent__double=True),
        # Once all episodes reach the time limit, gradients are close to 0. With Adam's usual epsilon of 1e-8, the next
        # failure then causes a full-size step.
        **settings(DOPAMINE_CARTPOLE, agent__adam_epsilon=3.125e-4),
        # With the zoo's learning rate of 2.3e-3, target update period of 128 and gradient norm of 10, returns rose and
        # fell throughout a run. With the values below, the mean of the last 5 evaluations reached 450 in 19 of 20 runs
        # with Adam's usual epsilon, and in 40 of 40 runs with this epsilon.
        **settings(
            "our experiments with more than 40 variants: benchmarks/notes/dqn-cartpole.md",
            agent__discount=0.995,
            agent__learning_rate="linear:1e-3:0",  # 6 of 6 seeds solve the task, with a constant rate 3 of 6
            agent__target_update_period=300,
            agent__max_grad_norm=0.5,
            network__hidden=(128, 128),
        ),
        **settings("our choice", steps=100_000, num_envs=8, network__orthogonal=True),
    },
)

ACROBOT = Preset(
    name="dqn/acrobot",
    envs=("Acrobot-v1",),
    fields={
        **settings(
            f"{ZOO}, Acrobot-v1",
            steps=100_000,
            agent__learning_rate=6.3e-4,
            agent__batch_size=128,
            agent__replay_capacity=50_000,
            agent__discount=0.99,
            agent__update_period=1,  # one update per step
            agent__target_update_period=250,
            network__hidden=(256, 256),
        ),
        # in the zoo, exploration ends after 0.12 of 100,000 steps: 12,000 updates
        **settings(f"{ZOO}, Acrobot-v1{FROM_FIRST_UPDATE}", agent__epsilon="linear:1:0.1@12000"),
        **settings(SB3, network="mlp", network__activation="relu", agent__optimizer="adam", agent__max_grad_norm=10.0),
        **settings("our choice", agent__min_replay_size=1_000, num_envs=4, network__orthogonal=True),
    },
)

MOUNTAIN_CAR = Preset(
    name="dqn/mountain_car",
    envs=("MountainCar-v0",),
    fields={
        # With the zoo's settings and random actions that last one step, 2 of 3 seeds never reached the goal within
        # 150,000 steps.
        **settings(
            "Dabney et al. 2020, arXiv:2006.01782: repeat random actions",
            agent__exploration_duration_exponent=2.0,
        ),
        **settings(RAINBOW, agent__double=True),
        **settings(
            "our experiments, best of 5 variants with 3 seeds each: benchmarks/notes/classic-control.md",
            agent__n_step=5,
            agent__learning_rate="linear:2e-3:0",
            agent__batch_size=64,
            agent__replay_capacity=100_000,
            agent__min_replay_size=1_000,
            agent__discount=0.99,
            agent__update_period=2,
            agent__target_update_period=300,
            agent__epsilon="linear:1:0.05@20000",  # 40,000 steps
            network__hidden=(128, 128),
            num_envs=4,
        ),
        **settings(SB3, network="mlp", network__activation="relu", agent__optimizer="adam", agent__max_grad_norm=10.0),
        **settings("our choice", steps=150_000, network__orthogonal=True),
    },
)

ATARI_GAMES = Preset(
    name="dqn/atari",
    envs=ATARI,
    excluded_envs=MUJOCO,
    fields={
        **settings(
            CLEANRL_ATARI,
            steps=10_000_000,
            env_kwargs=ATARI_TRAINING,
            agent__learning_rate=1e-4,
            agent__optimizer="adam",
            agent__batch_size=32,
            agent__replay_capacity=1_000_000,
            agent__min_replay_size=80_000,
            agent__discount=0.99,
            agent__update_period=4,
            agent__target_update_period=250,  # 1,000 steps
        ),
        # exploration ends after 0.1 of 10 million steps: 250,000 updates
        **settings(f"{CLEANRL_ATARI}{FROM_FIRST_UPDATE}", agent__epsilon="linear:1:0.01@250000"),
        **settings("Mnih et al. 2015: clipped errors; CleanRL does not clip them", agent__head__huber_threshold=1.0),
        **settings("Mnih et al. 2015: the network", network="nature_cnn", network__orthogonal=False),
        **settings("Mnih et al. 2015: complete games, unclipped scores", eval_env_kwargs=ATARI_EVALUATION),
        **settings("our choice", num_envs=8),
    },
)

RAINBOW_ATARI = Preset(
    name="dqn/rainbow_atari",
    envs=ATARI,
    excluded_envs=MUJOCO,
    automatic=False,
    fields={
        **settings(
            f"{RAINBOW}, converted from frames to steps of 4 frames",
            agent__min_replay_size=20_000,
            agent__optimizer="adam",
            agent__learning_rate=6.25e-5,
            agent__adam_epsilon=1.5e-4,
            agent__epsilon=0.0,  # the noisy network explores
            agent__target_update_period=2_000,  # 8,000 steps
            agent__prioritized=True,
            agent__priority_exponent=0.5,
            agent__importance_exponent="linear:0.4:1",
            agent__n_step=3,
            agent__head="categorical",
            agent__head__num_atoms=51,
            agent__head__value_min=-10.0,
            agent__head__value_max=10.0,
            network__noisy=0.5,
        ),
        **settings(
            "Hessel et al. 2018 (Rainbow), table 4",
            agent__discount=0.99,
            agent__batch_size=32,
            agent__update_period=4,
            agent__replay_capacity=1_000_000,
        ),
        **settings("Hessel et al. 2018 (Rainbow): components", agent__double=True, network__dueling=True),
        **settings("dqn_zoo, rainbow/run_atari.py", agent__max_grad_norm=10.0),
        **settings("our choice: a fifth of the paper's 50,000,000", steps=10_000_000),
        **settings("Mnih et al. 2015: clipped rewards, one life per episode", env_kwargs=ATARI_TRAINING),
        **settings("Mnih et al. 2015: the network", network="nature_cnn", network__orthogonal=False),
        **settings("Mnih et al. 2015: complete games, unclipped scores", eval_env_kwargs=ATARI_EVALUATION),
        **settings("our choice", num_envs=8),
    },
)

# --- R2D2. The paper uses 256 actors on Atari.

POSITION_ONLY_CARTPOLE = Preset(
    name="r2d2/position_only_cartpole",
    envs=("PositionOnlyCartPole-v1",),
    fields={
        **settings(
            "Kapturowski et al. 2019, section 2.3 and table of hyper-parameters",
            agent__n_step=5,
            agent__rescaling=1e-3,
            agent__epsilon=0.4,
            agent__epsilon_exponent=7.0,
            agent__priority_exponent=0.9,
            agent__max_share=0.9,
            agent__importance_exponent=0.6,
            network="lstm",
        ),
        **settings(
            "our experiments: benchmarks/notes/position-only-cartpole.md",
            agent__batch_size=32,
            agent__sequence_length=32,
            agent__burn_in=8,
            agent__period=16,
            agent__replay_capacity=100_000,
            agent__min_replay_size=100,
            agent__update_period=16,  # on average, each step is sampled 64 times
            agent__target_update_period=300,
            agent__discount=0.99,
            agent__learning_rate="linear:1e-3:0",
            agent__adam_epsilon=1e-5,
            agent__max_grad_norm=10.0,
            network__hidden=(64,),
            network__size=64,
            network__activation="relu",
        ),
        **settings("our choice", steps=300_000, num_envs=8, network__orthogonal=True),
    },
)

# --- PQN. The paper uses Atari.

PQN_CARTPOLE = Preset(
    name="pqn/cartpole",
    envs=("CartPole-v[01]",),
    fields={
        **settings(
            "CleanRL, pqn.py",
            agent__num_epochs=4,
            agent__max_grad_norm=10.0,
            network="mlp",
            network__activation="relu",
            network__layer_norm=True,
        ),
        **settings(
            "our experiments with 18 variants: benchmarks/notes/pqn-cartpole.md",
            num_envs=16,
            agent__unroll_length=64,
            agent__num_minibatches=16,
            agent__discount=0.99,
            agent__q_lambda=0.95,
            agent__learning_rate="linear:5e-4:0",
            agent__epsilon="linear:1:0.01@0.3",
        ),
        # Once all episodes reach the time limit, gradients are close to 0. With Adam's usual epsilon of 1e-8, the next
        # failure then causes a full-size step.
        **settings(
            "Dopamine's DQN, jax/agents/dqn/configs/dqn_cartpole.gin; benchmarks/notes/pqn-cartpole.md",
            agent__adam_epsilon=3.125e-4,
        ),
        **settings("our choice", steps=300_000, network__hidden=(128, 128), network__orthogonal=False),
    },
)

PQN_MINATAR = Preset(
    name="pqn/minatar",
    envs=MINATAR,
    fields={
        **settings(
            "purejaxql, purejaxql/config/alg/pqn_minatar.yaml",
            steps=10_000_000,
            num_envs=128,
            agent__unroll_length=32,
            agent__num_epochs=2,
            agent__num_minibatches=32,
            agent__discount=0.99,
            agent__q_lambda=0.65,
            agent__epsilon="linear:1:0.05@0.1",
            agent__learning_rate="linear:5e-4:0",
            agent__max_grad_norm=10.0,
        ),
        **settings(
            "purejaxql, purejaxql/pqn_minatar.py: the network, without its division of the observation by 255",
            network="nature_cnn",
            network__channels=(16,),
            network__kernels=(3,),
            network__strides=(1,),
            network__hidden=(128,),
            network__activation="relu",
            network__orthogonal=False,
            network__layer_norm=True,
        ),
    },
)

# --- SAC

SAC_PENDULUM = Preset(
    name="sac/pendulum",
    envs=("Pendulum-v[01]",),
    fields={
        **settings("rl-baselines3-zoo, hyperparams/sac.yml, Pendulum-v1", steps=20_000, agent__learning_rate=1e-3),
        **settings(
            "stable-baselines3, default of SAC",
            num_envs=1,
            agent__batch_size=256,
            agent__min_replay_size=100,
            agent__discount=0.99,
            agent__target_update_rate=0.005,
        ),
    },
)

SAC_MUJOCO = Preset(
    name="sac/mujoco",
    envs=MUJOCO,
    fields={
        **settings(
            "CleanRL, sac_continuous_action.py",
            steps=1_000_000,
            num_envs=1,
            agent__batch_size=256,
            agent__min_replay_size=5_000,
            agent__discount=0.99,
            agent__learning_rate=3e-4,
            agent__critic_learning_rate=1e-3,
            agent__target_update_rate=0.005,
        ),
        # rlframe scales actions to [-1, 1] before it computes their entropy. CleanRL does not, but the entropy is the
        # same if the action range is [-1, 1]. CleanRL makes two policy updates in every second step. rlframe makes
        # one policy update in each step.
        **settings(
            "CleanRL, sac_continuous_action.py, which scales a tanh to these bounds; here the value is clipped",
            agent__min_log_std=-5.0,
        ),
    },
)

# --- TD3

TD3_PENDULUM = Preset(
    name="td3/pendulum",
    envs=("Pendulum-v[01]",),
    fields={
        **settings(
            "rl-baselines3-zoo, hyperparams/td3.yml, Pendulum-v1",
            steps=20_000,
            agent__discount=0.98,
            agent__replay_capacity=200_000,
            agent__min_replay_size=10_000,
            agent__exploration_noise=0.1,
            agent__learning_rate=1e-3,
        ),
        **settings("stable-baselines3, default of TD3", num_envs=1, agent__batch_size=256),
    },
)

TD3_MUJOCO = Preset(
    name="td3/mujoco",
    envs=MUJOCO,
    fields=settings(
        "CleanRL, td3_continuous_action.py",
        steps=1_000_000,
        num_envs=1,
        agent__batch_size=256,
        agent__min_replay_size=25_000,
        agent__discount=0.99,
        agent__learning_rate=3e-4,
        agent__exploration_noise=0.1,
        network="mlp",
        network__hidden=(256, 256),
        network__activation="relu",
        network__orthogonal=False,
    ),
)

PRESETS = (
    CARTPOLE,
    ACROBOT,
    MOUNTAIN_CAR,
    ATARI_GAMES,
    RAINBOW_ATARI,
    POSITION_ONLY_CARTPOLE,
    PQN_CARTPOLE,
    PQN_MINATAR,
    SAC_PENDULUM,
    SAC_MUJOCO,
    TD3_PENDULUM,
    TD3_MUJOCO,
)
