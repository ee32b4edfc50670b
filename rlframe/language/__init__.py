"""Language models: the model, the engine that decodes, the policy server, and environments. See `docs/llm.md`.

How a group of scored answers comes about:

1. `environments.BaseEnv.get_next_item` gives a prompt; `collect_trajectories` asks `ServerManager` for `group_size`
   answers, by way of the OpenAI API.
2. `server.PolicyServer` reads the request (`server/requests.py`), encodes its text (`model/tokenizers.py`) and
   submits it to `decoding.DecodeEngine`, where it shares a batch with all others (`decoding/slots.py`).
   `decoding/sampling.py` chooses tokens from the logits of `model/transformer.py`. `server/generation.py` makes text of
   them, `server/replies.py` the answer, which names the version of the parameters.
3. The environment scores the answers, makes a `ScoredDataGroup` of them (`environments/groups.py`) and sends it to the
   trajectory service (`environments/serving.py`). `rlframe.trajectories` says how it reaches the learner.
4. The learner publishes new parameters, which the policy server takes over between two calls of the engine.
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

# Where a name is, if not in `environments`. Imported on first use: not everyone has what servers and
# environments need.
_SUB_PACKAGE = {
    **dict.fromkeys(("ModelConfig", "RopeScaling"), "model"),
    **dict.fromkeys(("Answer", "DecodeEngine", "EngineConfig", "Handle", "SamplingParams", "generate"), "decoding"),
    **dict.fromkeys(("PolicyServer", "PolicyServerConfig"), "server"),
}
_PUBLIC = {name: f"rlframe.language.{_SUB_PACKAGE.get(name, 'environments')}" for name in __all__}

__getattr__, __dir__ = lazy_names(__name__, _PUBLIC)
