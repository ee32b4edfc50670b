"""What becomes of a scored group: whether it is sent, and with what."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rlframe.language.environments.types import ScoredDataGroup, ScoredDataItem
from rlframe.trajectories.client.groups import Group

if TYPE_CHECKING:
    from rlframe.language.environments.env import BaseEnv

logger = logging.getLogger(__name__)

_ROWS = (
    *("advantages", "ref_logprobs", "inference_logprobs", "messages", "overrides", "images"),
    *("distill_token_ids", "distill_logprobs"),
)


def put_together(items: list[ScoredDataItem]) -> ScoredDataGroup:
    """A group of sequences. What only some of them have is left out: its rows would be other sequences'."""
    rows: list[Mapping[str, Any]] = list(items)
    group: dict[str, Any] = {name: [row[name] for row in rows] for name in ("tokens", "masks", "scores")}
    for name in _ROWS:
        if all(row.get(name) is not None for row in rows):
            group[name] = [row[name] for row in rows]
    overrides: dict[str, Any] = {}
    for row in rows:
        overrides |= row.get("group_overrides") or {}
    if overrides:
        group["group_overrides"] = overrides
    return ScoredDataGroup(**group)  # type: ignore[typeddict-item]


def unfit(env: BaseEnv, group: ScoredDataGroup, check_length: bool) -> str | None:
    """Why a group is not sent, None where it is."""
    config, tokens = env.config, group.get("tokens") or []
    wanted = (group.get("group_overrides") or {}).get("group_size", config.group_size)
    if len(tokens) != wanted:
        return f"it has {len(tokens)} sequences, not {wanted}"
    scores = group["scores"]
    if config.ensure_scores_are_not_same and len(scores) > 1 and len(set(map(float, scores))) == 1:
        return f"its scores are all {float(scores[0]):g}"
    longest = max(map(len, tokens))
    if check_length and 0 < env.max_token_len < longest:
        return f"a sequence has {longest} tokens, and the trainer takes {env.max_token_len}"
    return None


def with_text(env: BaseEnv, group: ScoredDataGroup) -> ScoredDataGroup:
    """With messages, made from the tokens where there are none."""
    if group.get("messages"):
        return group
    messages = [[{"role": "user", "content": env.tokenizer.decode(list(row))}] for row in group["tokens"]]
    return ScoredDataGroup(**{**group, "messages": messages})  # type: ignore[typeddict-item]


def completion_lengths(group: ScoredDataGroup) -> list[int]:
    """Tokens that are trained on, of each sequence."""
    return [sum(mask != -100 for mask in row) for row in group["masks"]]


def to_send(group: ScoredDataGroup, env_id: int | None, policy_version: int | None) -> Group:
    """Raises `UsageError` where its rows do not fit each other."""
    version = group.get("policy_version")
    told = {"env_id": env_id, "policy_version": policy_version if version is None else version}
    empty = {name: None for name in ("group_overrides", "overrides", "images") if not group.get(name)}
    return Group.from_item({**group, **empty, **told})


def length_metrics(lengths: list[int], longest: int) -> dict[str, float]:
    """`train/completion_lengths...`, of sequences that may be `longest` tokens long; empty where there are none."""
    if not lengths:
        return {}
    mean = sum(lengths) / len(lengths)
    return {
        "train/completion_lengths": mean,
        "train/completion_lengths_std": math.sqrt(sum((one - mean) ** 2 for one in lengths) / len(lengths)),
        "train/completion_lengths_max": max(lengths),
        "train/completion_lengths_min": min(lengths),
        # Not a percentile: the part of them that is almost as long as can be. The name is the published one.
        "train/completion_lengths_p95": sum(one > 0.95 * longest for one in lengths) / len(lengths),
    }
