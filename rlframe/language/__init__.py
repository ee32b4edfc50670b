"""Reinforcement learning of language models: model, decode engine, policy server, environments.

The tutorial is docs/learn/language-model.md.

From a prompt to a group of scored completions:

1. `environments.BaseEnv.get_next_item` returns a prompt. `collect_trajectories` requests `group_size` completions from
   `ServerManager`, which uses the OpenAI API.
2. `server.PolicyServer` parses the request (`server/requests.py`), encodes its text (`model/tokenizers.py`) and submits
   it to `decoding.DecodeEngine`, which decodes it in one batch with other requests (`decoding/slots.py`).
   `decoding/sampling.py` samples tokens from the logits of `model/transformer.py`. `server/generation.py` decodes the
   tokens to text. `server/replies.py` makes the response, which contains the version of the parameters.
3. The environment scores the completions, makes a `ScoredDataGroup` (`environments/groups.py`) and sends it to the
   trajectory service (`environments/serving.py`). `rlframe.trajectories` describes the way from there to the learner.
4. The learner publishes new parameters. The policy server loads them between two calls of the engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlframe.extras import lazy_names

if TYPE_CHECKING:
    from rlframe.language.decoding import (
        Answer,
        DecodeEngine,
        EngineConfig,
        Handle,
        SamplingParams,
        generate,
    )
    from rlframe.language.environments import (
        APIServer,
        APIServerConfig,
        BaseEnv,
        BaseEnvConfig,
        EvalHandlingEnum,
        Item,
        ManagedServer,
        Message,
        OpenaiConfig,
        ReasoningConfig,
        ScoredDataGroup,
        ScoredDataItem,
        SequenceNode,
        ServerBaseline,
        ServerManager,
        ServerManagerConfig,
        number,
        tokenize_for_trainer,
    )
    from rlframe.language.model import ModelConfig, RopeScaling
    from rlframe.language.server import PolicyServer, PolicyServerConfig

__all__ = [
    "APIServer",
    "APIServerConfig",
    "Answer",
    "BaseEnv",
    "BaseEnvConfig",
    "DecodeEngine",
    "EngineConfig",
    "EvalHandlingEnum",
    "Handle",
    "Item",
    "ManagedServer",
    "Message",
    "ModelConfig",
    "OpenaiConfig",
    "PolicyServer",
    "PolicyServerConfig",
    "ReasoningConfig",
    "RopeScaling",
    "SamplingParams",
    "ScoredDataGroup",
    "ScoredDataItem",
    "SequenceNode",
    "ServerBaseline",
    "ServerManager",
    "ServerManagerConfig",
    "generate",
    "number",
    "tokenize_for_trainer",
]

# Public name -> the subpackage that defines it. All other names are defined in `environments`. A name is imported when
# it is first used, because servers and environments need packages that may not be installed.
_SUB_PACKAGE = {
    **dict.fromkeys(("ModelConfig", "RopeScaling"), "model"),
    **dict.fromkeys(("Answer", "DecodeEngine", "EngineConfig", "Handle", "SamplingParams", "generate"), "decoding"),
    **dict.fromkeys(("PolicyServer", "PolicyServerConfig"), "server"),
}
_PUBLIC = {name: f"rlframe.language.{_SUB_PACKAGE.get(name, 'environments')}" for name in __all__}

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
