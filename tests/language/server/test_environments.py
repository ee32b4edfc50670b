"""Test environments of `examples/llm` with a real policy server."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rlframe.language.environments import APIServerConfig
from rlframe.language.model import transformer
from rlframe.language.model.tokenizers import ByteTokenizer
from tests.language.environments.test_llm_examples import load_example
from tests.language.server.serving import DEADLINE, TINY, Learner, params_of, serving_policy

TOKENIZER = ByteTokenizer()


def with_env(server, cls, use, **options):
    """Make and set up an environment. Run the coroutine `use(env)`, and return its result."""
    config, _ = cls.config_init()
    config = type(config)(**{**config.model_dump(), "group_size": 4, **options})

    async def run():
        env = cls(config, [APIServerConfig(base_url=server.url(), model_name="policy", timeout=60)])
        try:
            await env.setup()
            return await use(env)
        finally:
            await env.close()

    return asyncio.run(asyncio.wait_for(run(), DEADLINE))


def check_group(group, params):
    """Check that a group's log-probabilities equal those that the model gives to the sampled tokens."""
    rows = list(zip(group["tokens"], group["masks"], group["inference_logprobs"]))
    assert len(rows) == len(group["scores"]) == 4
    for tokens, masks, log_probs in rows:
        computed = transformer.token_log_probs(params, TINY, np.array([tokens]))[0].tolist()
        sampled = [at for at, mask in enumerate(masks) if mask != -100]
        assert sampled and all(masks[at] == tokens[at] for at in sampled)
        assert [log_probs[at] for at in sampled] == pytest.approx([computed[at - 1] for at in sampled], abs=1e-4)


def test_single_turn_environment_gets_tokens_and_log_probs():
    async def use(env):
        group, _ = await env.collect_trajectories("abc")
        await env.evaluate()
        return group, env.metrics

    with serving_policy(Learner(version=3)) as server:
        group, metrics = with_env(server, load_example("reverse").Reverse, use, eval_size=8)
    check_group(group, params_of(3))
    assert all(TOKENIZER.decode(tokens).startswith("abc>") for tokens in group["tokens"])
    assert metrics["eval/exact_match"] == 0.0


def test_multi_turn_environment_gets_tokens_and_log_probs():
    async def use(env):
        group, _ = await env.collect_trajectories(await env.get_next_item())
        return group

    with serving_policy(Learner(version=3)) as server:
        group = with_env(server, load_example("guess").Guess, use)
    check_group(group, params_of(3))
