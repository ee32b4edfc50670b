"""Pad groups of different lengths to rectangular arrays. There are few different shapes, so few compilations."""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlframe.trajectories.client.groups import Group
from rlframe.trajectories.messages import IGNORED
from rlframe.types import TokenBatch

_SHORTEST = 64  # tokens

_log = logging.getLogger(__name__)


def bucket_lengths(max_token_len: int) -> list[int]:
    """Return the possible lengths of a padded batch: powers of two and their midpoints, up to `max_token_len`.

    So the padding is shorter than half of the longest sequence. There is one compiled update for each length, for
    example 21 updates for sequences of up to 65,536 tokens.
    """
    lengths, length = [], _SHORTEST
    while length < max_token_len:
        lengths += [length, length + length // 2]
        length *= 2
    return [length for length in lengths if length < max_token_len] + [max_token_len]


def pad(groups: Sequence[Group], buckets: list[int]) -> tuple[TokenBatch, int]:
    """Convert `groups` to arrays. The arrays have the smallest length in `buckets` that fits the longest sequence.

    Sequences that are longer than the last bucket are truncated. The loss of the remaining tokens stays correct.

    Returns:
        (batch, number of truncated sequences).
    """
    full = np.concatenate([group.lengths for group in groups])
    lengths = np.minimum(full, buckets[-1])
    length = buckets[bisect.bisect_left(buckets, lengths.max())]
    shape = (len(lengths), length)
    scores = np.concatenate([group.scores for group in groups]).astype(np.float32)
    present = np.arange(length) < lengths[:, None]
    masks = _fill([row for group in groups for row in group.masks], shape, np.int32)
    mask = ((masks != IGNORED) & present).astype(np.float32)
    advantages = np.repeat(scores[:, None], length, axis=1)
    sent = [row for group in groups for row in group.advantages or [None] * len(group)]
    having = np.array([row is not None for row in sent])
    advantages[having] = _fill([row for row in sent if row is not None], (having.sum(), length), np.float32)
    overrides = [override for group in groups for override in group.sequence_overrides]
    zeroed = np.array([bool(override.get("set_advantage_to_zero")) for override in overrides])
    temperature = np.concatenate([group.temperatures for group in groups])
    advantages[zeroed] = 0.0
    batch = TokenBatch(
        tokens=_fill([row for group in groups for row in group.tokens], shape, np.int32),
        mask=mask,
        advantages=advantages * mask,
        has_advantages=having | zeroed,
        scores=scores,
        temperature=None if (temperature == 1).all() else temperature,
        inference_logprobs=_optional("inference_logprobs", groups, mask),
        ref_logprobs=_optional("ref_logprobs", groups, mask),
        lengths=lengths,
        group=np.repeat(np.arange(len(groups), dtype=np.int32), [len(group) for group in groups]),
    )
    return batch, int((full > lengths).sum())


def _optional(name: str, groups: Sequence[Group], mask: np.ndarray) -> np.ndarray | None:
    having = [group for group in groups if getattr(group, name) is not None]
    if len(having) < len(groups):
        if having:
            without = sorted({str(group.env_id) for group in groups if getattr(group, name) is None})
            _log.warning(
                "A batch is without %s: only %d of its %d groups have them. They are missing from environment %s.",
                name,
                len(having),
                len(groups),
                ", ".join(without),
            )
        return None
    return _fill([row for group in groups for row in getattr(group, name)], mask.shape, np.float32) * mask


def _fill(rows: Sequence[np.ndarray], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    filled = np.zeros(shape, dtype)
    for target, row in zip(filled, rows):
        count = min(len(row), shape[1])
        target[:count] = row[:count]
    return filled
