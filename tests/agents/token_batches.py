"""A function that creates random batches of scored sequences, in the format of a TrajectoryBuffer."""

from __future__ import annotations

import numpy as np

from rlframe.types import Batch, TokenBatch


def token_batch(vocab_size: int, lengths, group, *, prompt: int = 2, padded: int = 9, seed: int = 0, **fields) -> Batch:
    """Return random token sequences with random scores. The first `prompt` tokens are not trained on."""
    random = np.random.RandomState(seed)
    S = len(lengths)
    present = np.arange(padded) < np.array(lengths)[:, None]
    mask = (present & (np.arange(padded) >= prompt)).astype(np.float32)
    scores = random.randn(S).astype(np.float32)
    data = TokenBatch(
        tokens=(random.randint(0, vocab_size, (S, padded)) * present).astype(np.int32),
        mask=mask,
        advantages=scores[:, None] * mask,
        has_advantages=np.zeros(S, bool),
        scores=scores,
        temperature=None,
        inference_logprobs=(-3 * random.rand(S, padded) * mask).astype(np.float32),
        ref_logprobs=None,
        lengths=np.array(lengths, np.int32),
        group=np.array(group, np.int32),
    )
    keys = np.stack([np.full(S, -1), np.zeros(S), np.arange(S)], axis=1).astype(np.int64)
    return Batch(data._replace(**fields), keys, np.full(S, 1 / S, np.float32), np.zeros(S, np.int64))
