"""GRPO's presets. The defaults of `GRPOConfig` are the paper's, for a model of 7 billion parameters."""

from __future__ import annotations

from rlframe.lm import ModelConfig
from rlframe.programs.presets.table import Preset, settings

DAPO = "Yu et al. 2025 (DAPO), arXiv:2503.14476"

REVERSE = Preset(
    name="grpo/reverse",
    envs=("Reverse",),
    fields={
        **settings(DAPO, agent__average="token", agent__clip_epsilon_high=0.28, agent__kl_cost=0.0),
        **settings(
            "found here",
            agent__model=ModelConfig(
                hidden_size=128,
                intermediate_size=384,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=64,
            ),
            agent__learning_rate=3e-4,
            agent__learning_rate_rise=20,
            agent__supervised_steps=300,
            agent__supervised_batch_size=32,
            agent__supervised_learning_rate=1e-3,
        ),
        **settings("the environment's longest: 6 letters, `>`, 6 letters, the end", agent__max_tokens=16),
        **settings("our choice: 16 groups of 16", agent__batch_size=256),
    },
)

PRESETS = (REVERSE,)
