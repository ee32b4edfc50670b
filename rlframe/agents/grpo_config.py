"""The options of GRPO."""

from __future__ import annotations

import dataclasses
import os
from typing import Literal, Union

from rlframe.agents.losses_lm import Average
from rlframe.errors import UsageError, check_above, check_at_least
from rlframe.language.model import ModelConfig, weights


@dataclasses.dataclass(frozen=True)
class GRPOConfig:
    """Defaults: Shao et al. 2024, section 4.2; where it is silent, PPO's.

    A batch's padding decides the shapes that an update is compiled for; `TrajectoryBuffer` has few of them.
    """

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)  # of random weights; not read with `weights`
    weights: Union[str, None] = None  # a folder in the published format: see `rlframe.language.model.weights`
    dtype: Literal["float32", "bfloat16", None] = None  # of the weights; None: what the model's config says
    max_tokens: int = 1024  # of a sequence, with its prompt
    batch_size: int = 1024  # sequences for each update
    loss: Literal["grpo", "policy_gradient", "dpo", "sft"] = "grpo"
    normalise_std: bool = True  # divide advantages by their group's standard deviation; False: Dr. GRPO
    average: Average = "sequence"  # of tokens within sequences, then of these; "token": of all tokens, DAPO
    clip_epsilon: float = 0.2  # grpo: the ratio to the policy that sampled is clipped to 1 - it, 1 + it
    clip_epsilon_high: Union[float, None] = None  # ... to 1 + this, for DAPO's clip-higher (0.28); None: the same
    # What was sampled by much older parameters counts by at most this ratio: grpo, where the advantage is negative;
    # policy_gradient, always. None: no bound. Ye et al. 2020, arXiv:1912.09729.
    ratio_cap: Union[float, None] = 3.0
    kl_cost: float = 0.04  # to the reference: the initial parameters, or the batch's ref_logprobs; 0: none is kept
    dpo_beta: float = 0.1  # dpo; Rafailov et al. 2023, arXiv:2305.18290, appendix B
    learning_rate: float = 1e-6
    learning_rate_rise: int = 0  # updates until the learning rate is reached, from 0, in a line
    adam_b1: float = 0.9
    adam_b2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0  # of matrices (Loshchilov and Hutter 2019, AdamW)
    max_grad_norm: Union[float, None] = 1.0
    micro_batch_size: Union[int, None] = None  # sequences whose gradient is computed at once; None: the batch
    remat: bool = False  # compute layers a second time for the gradient, and keep less
    logits_chunk: Union[int, None] = None  # positions of a sequence whose logits are kept at once; None: all
    master_weights: bool = True  # of a bfloat16 model: the optimizer has a float32 copy, which small updates reach
    # Of the supervised warm-up before all this, see `rlframe.learners.warm_up`.
    supervised_steps: int = 0  # updates; 0: there is none
    supervised_batch_size: int = 64  # demonstrations for each
    supervised_learning_rate: float = 1e-5

    def __post_init__(self) -> None:
        if self.weights is not None:  # once: an environment may change the directory
            object.__setattr__(self, "weights", os.path.abspath(self.weights))
        check_at_least(self, 1, "max_tokens", "batch_size", "micro_batch_size", "logits_chunk", "supervised_batch_size")
        check_above(self, 0, "learning_rate", "supervised_learning_rate", "max_grad_norm")
        check_above(self, 0, "clip_epsilon", "clip_epsilon_high", "ratio_cap", "dpo_beta")
        check_at_least(self, 0, "kl_cost", "learning_rate_rise", "weight_decay", "supervised_steps")
        if self.clip_epsilon >= 1.0:
            raise UsageError(f"GRPOConfig.clip_epsilon must be below 1, got {self.clip_epsilon}.")
        if self.loss == "dpo" and self.micro_batch_size is not None:
            raise UsageError(
                "GRPOConfig.micro_batch_size must be None for the loss dpo: its pairs need the whole batch."
            )

    @property
    def has_reference(self) -> bool:
        """Whether the loss looks at a reference."""
        return self.loss == "dpo" or (self.loss != "sft" and self.kl_cost > 0)

    @property
    def model_config(self) -> ModelConfig:
        """What the model is: `model`, or what the folder `weights` says, with `dtype`.

        Raises:
            CheckpointError: there is no such folder, or no `config.json` in it.
            UsageError: the model's architecture is not implemented.
        """
        if self.weights is not None:
            return weights.read_config(self.weights, dtype=self.dtype)
        return dataclasses.replace(self.model, dtype=self.dtype) if self.dtype else self.model
