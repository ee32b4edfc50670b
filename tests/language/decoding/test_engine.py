"""Test the answers of the decode engine, and the failures of the engine, after which all pending requests raise."""

from __future__ import annotations

import concurrent.futures
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlframe.errors import PeerError, UnavailableError, UsageError
from rlframe.language import DecodeEngine, EngineConfig, SamplingParams
from rlframe.language.model import transformer
from tests.language.decoding.small import CONFIG, learner_log_probs, weights

SMALL = EngineConfig(slots=4, steps=2)
TIMEOUT = 120.0


@pytest.fixture
def engine():
    with DecodeEngine(CONFIG, weights(), SMALL) as engine:
        yield engine
    assert not engine._thread.is_alive()


class Gate:
    """A callback for `on_tokens` that blocks the engine after each piece, until the test calls `release_once`."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Semaphore(0), threading.Semaphore(0)
        self.pieces: list = []

    def __call__(self, piece) -> None:
        self.pieces.append(piece)
        self.entered.release()
        assert self.released.acquire(timeout=TIMEOUT)

    def wait(self) -> None:
        assert self.entered.acquire(timeout=TIMEOUT)

    def release_once(self) -> None:
        self.released.release()

    def release_all(self) -> None:
        self.released.release(1000)


@pytest.mark.system
def test_log_probs_of_an_answer_equal_those_of_a_learner(engine):
    handles = {n: engine.submit(list(range(n)), SamplingParams(max_tokens=64 - n, seed=n)) for n in (1, 5, 16, 17, 40)}
    for n, handle in handles.items():
        answer = handle.result(TIMEOUT)
        assert len(answer.tokens) == 64 - n and answer.finish_reason == "length"
        assert answer.versions == [0] * (64 - n)
        np.testing.assert_allclose(answer.log_probs, learner_log_probs(range(n), answer.tokens), atol=1e-4)


@pytest.mark.system
def test_temperature_0_samples_the_most_likely_tokens(engine):
    prompts, sampling = [[1, 2], [3] * 20, [4], [5], [6], [7]], SamplingParams(max_tokens=10, temperature=0.0)
    for prompt, handle in zip(prompts, engine.submit_many(prompts, sampling)):
        tokens = handle.result(TIMEOUT).tokens
        logits = transformer.apply(weights(), CONFIG, jnp.array([prompt + tokens]))[0, len(prompt) - 1 : -1]
        assert len(tokens) == 10 and tokens == np.argmax(logits, axis=-1).tolist()


@pytest.mark.system
def test_answer_with_a_seed_is_independent_of_other_requests(engine):
    sampling = SamplingParams(max_tokens=20, seed=11)
    alone = engine.submit([1, 2, 3], sampling).result(TIMEOUT)
    others = engine.submit_many([[i] * (i + 1) for i in range(30)], SamplingParams(max_tokens=13))
    crowded = engine.submit([1, 2, 3], sampling).result(TIMEOUT)
    assert crowded.tokens == alone.tokens
    np.testing.assert_allclose(crowded.log_probs, alone.log_probs, atol=1e-5)
    assert engine.submit([1, 2, 3], SamplingParams(max_tokens=20, seed=12)).result(TIMEOUT).tokens != alone.tokens
    assert all(len(handle.result(TIMEOUT).tokens) == 13 for handle in others)


@pytest.mark.system
def test_answers_to_the_same_prompt_differ_and_are_reproducible(engine):
    sampling = SamplingParams(max_tokens=12, seed=3)
    groups = []
    for _ in range(2):
        groups.append([handle.result(TIMEOUT).tokens for handle in engine.submit_many([[9, 8]] * 6, sampling)])
    assert groups[0] == groups[1]
    assert len(set(map(tuple, groups[0]))) == 6
    assert engine.submit([9, 8], sampling).result(TIMEOUT).tokens == groups[0][0]


def test_requests_without_a_seed_get_different_answers(engine):
    sampling = SamplingParams(max_tokens=12)
    answers = [engine.submit([9], sampling).result(TIMEOUT).tokens for _ in range(3)]
    assert len(set(map(tuple, answers))) == 3


def test_stop_token_is_the_last_token_of_an_answer(engine):
    whole = engine.submit([1], SamplingParams(max_tokens=20, seed=1)).result(TIMEOUT)
    for position in (0, 1, 7):
        stop = whole.tokens[position]
        end = whole.tokens.index(stop) + 1
        answer = engine.submit([1], SamplingParams(max_tokens=20, seed=1, stop_tokens=(39, stop))).result(TIMEOUT)
        assert (answer.tokens, answer.finish_reason) == (whole.tokens[:end], "stop")


def test_streamed_pieces_add_up_to_the_answer(engine):
    pieces: list = []
    answer = engine.submit([1], SamplingParams(max_tokens=8, seed=1), pieces.append).result(TIMEOUT)
    # Prefill samples 1 token. Each later call samples up to 2 tokens, the value of `EngineConfig.steps`.
    assert [len(piece.tokens) for piece in pieces] == [1, 2, 2, 2, 1]
    assert [piece.finish_reason for piece in pieces] == [None] * 4 + ["length"]
    for name in ("tokens", "log_probs", "versions"):
        assert [value for piece in pieces for value in getattr(piece, name)] == getattr(answer, name)


def test_new_request_starts_while_another_is_decoded(engine):
    gate = Gate()
    long = engine.submit([1], SamplingParams(max_tokens=40), gate)
    gate.wait()
    short = engine.submit([2], SamplingParams(max_tokens=3))
    for _ in range(3):
        gate.release_once()
        gate.wait()
    assert len(short.result(TIMEOUT).tokens) == 3
    assert not long.done and len(gate.pieces) == 4
    gate.release_all()
    assert len(long.result(TIMEOUT).tokens) == 40


def test_running_request_continues_with_new_parameters(engine):
    gate = Gate()
    handle = engine.submit([1], SamplingParams(max_tokens=7, seed=1), gate)
    for version in (0, 0, 5):
        gate.wait()  # the callback blocks the engine after tokens 1, 3 and 5
        assert engine.version == version - 5 * (version == 5)
        if len(gate.pieces) == 3:
            engine.set_params(5, jax.tree.map(np.asarray, weights(1)))
            assert engine.version == 5
        gate.release_once()
    gate.release_all()
    answer = handle.result(TIMEOUT)
    assert answer.versions == [0] * 5 + [5] * 2
    # The engine does not recompute the cache, so keys and values of earlier tokens come from the old parameters.
    cache, none = transformer.init_cache(CONFIG, 1, 64), jnp.zeros(1, jnp.int32)
    old, cache = transformer.apply_cached(weights(), CONFIG, jnp.array([[1, *answer.tokens[:4]]]), cache, none)
    new, _ = transformer.apply_cached(weights(1), CONFIG, jnp.array([answer.tokens[4:6]]), cache, none + 5)
    expected = jax.nn.log_softmax(jnp.concatenate([old, new], axis=1))[0]
    np.testing.assert_allclose(answer.log_probs, expected[jnp.arange(7), jnp.array(answer.tokens)], atol=1e-4)


def test_engine_copies_its_parameters():
    params = jax.tree.map(lambda x: x + 0, weights())
    with DecodeEngine(CONFIG, params, SMALL) as engine:
        jax.tree.map(lambda leaf: leaf.delete(), params)
        assert len(engine.submit([1], SamplingParams(max_tokens=3)).result(TIMEOUT).tokens) == 3
        arrays = jax.tree.map(lambda x: np.array(x), weights(1))
        engine.set_params(1, arrays)
        sampling = SamplingParams(max_tokens=9, seed=0)
        before = engine.submit([1], sampling).result(TIMEOUT)
        for leaf in jax.tree.leaves(arrays):
            leaf[...] = 0
        assert engine.submit([1], sampling).result(TIMEOUT) == before


def test_parameters_of_another_model_are_refused(engine):
    wrong = {**weights(1), "norm": jnp.ones(3)}
    with pytest.raises(UsageError, match=r"1 are not the model's: \['norm'\] has the shape \(3,\), expected \(16,\)"):
        engine.set_params(1, wrong)
    with pytest.raises(UsageError, match="lm_head.* has the shape"):
        engine.set_params(1, {**weights(1), "lm_head": jnp.ones((16, 40))})
    engine.set_params(4, weights(1))
    with pytest.raises(UsageError, match="has version 4 already, but got the older version 3"):
        engine.set_params(3, weights(1))


def test_parameters_with_nan_fail_only_requests_that_use_them(engine):
    engine.set_params(1, jax.tree.map(lambda x: x * jnp.nan, weights()))
    with pytest.raises(UnavailableError, match="The parameters of version 1 give logits that are not finite"):
        engine.submit([1], SamplingParams(max_tokens=3)).result(TIMEOUT)
    engine.set_params(2, weights())
    assert len(engine.submit([1], SamplingParams(max_tokens=3)).result(TIMEOUT).tokens) == 3


def test_cancelled_request_frees_its_slot_or_its_place_in_the_queue():
    with DecodeEngine(CONFIG, weights(), EngineConfig(slots=1, steps=2, max_waiting=2)) as engine:
        gate = Gate()
        running = engine.submit([1], SamplingParams(max_tokens=40), gate)
        gate.wait()
        waiting = engine.submit_many([[2], [3]], SamplingParams(max_tokens=2))
        with pytest.raises(UnavailableError, match="2 requests wait for the decode engine; at most 2 may wait"):
            engine.submit([4])
        waiting[0].cancel()
        assert engine.stats()["waiting"] == 1
        other = engine.submit([4], SamplingParams(max_tokens=2))
        running.cancel()
        gate.release_all()
        assert len(other.result(TIMEOUT).tokens) == len(waiting[1].result(TIMEOUT).tokens) == 2
        for cancelled in (running, waiting[0]):
            with pytest.raises(concurrent.futures.CancelledError):
                cancelled.result(TIMEOUT)
        assert len(gate.pieces) == 1


def test_error_in_on_tokens_affects_only_its_own_request(engine):
    def fail(_):
        raise ValueError("mine")

    other = engine.submit([1], SamplingParams(max_tokens=9))
    with pytest.raises(ValueError, match="mine"):
        engine.submit([1], SamplingParams(max_tokens=9), fail).result(TIMEOUT)
    assert len(other.result(TIMEOUT).tokens) == 9


def test_close_fails_all_pending_requests():
    engine = DecodeEngine(CONFIG, weights(), EngineConfig(slots=1, steps=2))
    gate = Gate()
    handles = [engine.submit([1], SamplingParams(max_tokens=40), gate), engine.submit([2])]
    gate.wait()
    with pytest.raises(PeerError, match="did not complete the answer within 0.01 s"):
        handles[0].result(timeout=0.01)
    with pytest.raises(PeerError, match="thread did not end within 0.01 s"):
        engine.close(timeout=0.01)
    for handle in handles:  # the requests fail although the engine's thread is still blocked
        with pytest.raises(UnavailableError, match="closed"):
            handle.result(TIMEOUT)
    gate.release_all()
    engine.close()
    engine.close()
    assert not engine._thread.is_alive()
    with pytest.raises(UnavailableError, match="closed"):
        engine.submit([1])


def test_device_failure_fails_running_and_later_requests(engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._slots, "decode", fail)
    handle = engine.submit([1], SamplingParams(max_tokens=9))
    with pytest.raises(UnavailableError, match="decode engine failed: RuntimeError: out of memory"):
        handle.result(TIMEOUT)
    with pytest.raises(UnavailableError, match="out of memory"):
        engine.submit([1])


def test_concurrent_threads_get_the_answers_to_their_own_requests(engine):
    def ask(n: int) -> list[int]:
        sampling = SamplingParams(max_tokens=1 + n % 7, seed=n)
        return engine.submit([n] * (1 + n % 5), sampling).result(TIMEOUT).tokens

    expected = [ask(n) for n in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(40))) == expected
    stats = engine.stats()
    assert stats["requests"] == 80 and stats["tokens"] == 2 * sum(1 + n % 7 for n in range(40))
    assert stats["waiting"] == 0


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], SamplingParams(), "prompt is empty"),
        ([40], SamplingParams(), "token ids are 0 to 39"),
        ([1] * 64, SamplingParams(), "has 64 tokens and max_tokens is 1. Together, at most 64"),
        ([1], SamplingParams(stop_tokens=tuple(range(9))), "9 stop_tokens; EngineConfig.max_stop_tokens is 8"),
    ],
)
def test_invalid_requests_are_refused(engine, prompt, sampling, message):
    with pytest.raises(UsageError, match=message):
        engine.submit(prompt, sampling)


def test_invalid_engine_config_is_refused():
    with pytest.raises(UsageError, match="length is 65, more than the model's max_position_embeddings of 64"):
        DecodeEngine(CONFIG, weights(), EngineConfig(length=65))
    with pytest.raises(UsageError, match="EngineConfig.slots must be at least 1, got 0"):
        EngineConfig(slots=0)
