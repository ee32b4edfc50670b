"""The decode engine: what is answered, and that nobody waits for ever."""

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
from tests.language.decoding.small import CONFIG, learners_log_probs, weights

SMALL = EngineConfig(slots=4, steps=2)
TIMEOUT = 120.0


@pytest.fixture
def engine():
    with DecodeEngine(CONFIG, weights(), SMALL) as engine:
        yield engine
    assert not engine._thread.is_alive()


class Gate:
    """Holds the engine in a request's `on_tokens`, so that a test decides what happens between two calls."""

    def __init__(self) -> None:
        self.inside, self.opened = threading.Semaphore(0), threading.Semaphore(0)
        self.pieces: list = []

    def __call__(self, piece) -> None:
        self.pieces.append(piece)
        self.inside.release()
        assert self.opened.acquire(timeout=TIMEOUT)

    def wait(self) -> None:
        assert self.inside.acquire(timeout=TIMEOUT)

    def pass_on(self) -> None:
        self.opened.release()

    def leave_open(self) -> None:
        self.opened.release(1000)


@pytest.mark.system
def test_tokens_have_the_log_probs_that_a_learner_computes(engine):
    handles = {n: engine.submit(list(range(n)), SamplingParams(max_tokens=64 - n, seed=n)) for n in (1, 5, 16, 17, 40)}
    for n, handle in handles.items():
        answer = handle.result(TIMEOUT)
        assert len(answer.tokens) == 64 - n and answer.finish_reason == "length"
        assert answer.versions == [0] * (64 - n)
        np.testing.assert_allclose(answer.log_probs, learners_log_probs(range(n), answer.tokens), atol=1e-4)


@pytest.mark.system
def test_greedy_answers_are_the_likeliest_tokens_however_many_requests_there_are(engine):
    prompts, sampling = [[1, 2], [3] * 20, [4], [5], [6], [7]], SamplingParams(max_tokens=10, temperature=0.0)
    for prompt, handle in zip(prompts, engine.submit_many(prompts, sampling)):
        tokens = handle.result(TIMEOUT).tokens
        logits = transformer.apply(weights(), CONFIG, jnp.array([prompt + tokens]))[0, len(prompt) - 1 : -1]
        assert len(tokens) == 10 and tokens == np.argmax(logits, axis=-1).tolist()


@pytest.mark.system
def test_a_seed_decides_the_answer_whatever_else_is_decoded(engine):
    sampling = SamplingParams(max_tokens=20, seed=11)
    alone = engine.submit([1, 2, 3], sampling).result(TIMEOUT)
    others = engine.submit_many([[i] * (i + 1) for i in range(30)], SamplingParams(max_tokens=13))
    crowded = engine.submit([1, 2, 3], sampling).result(TIMEOUT)
    assert crowded.tokens == alone.tokens
    np.testing.assert_allclose(crowded.log_probs, alone.log_probs, atol=1e-5)
    assert engine.submit([1, 2, 3], SamplingParams(max_tokens=20, seed=12)).result(TIMEOUT).tokens != alone.tokens
    assert all(len(handle.result(TIMEOUT).tokens) == 13 for handle in others)


def test_samples_of_one_prompt_differ_and_repeat(engine):
    sampling = SamplingParams(max_tokens=12, seed=3)
    groups = []
    for _ in range(2):
        groups.append([handle.result(TIMEOUT).tokens for handle in engine.submit_many([[9, 8]] * 6, sampling)])
    assert groups[0] == groups[1]
    assert len(set(map(tuple, groups[0]))) == 6
    assert engine.submit([9, 8], sampling).result(TIMEOUT).tokens == groups[0][0]


def test_requests_without_a_seed_differ(engine):
    sampling = SamplingParams(max_tokens=12)
    answers = [engine.submit([9], sampling).result(TIMEOUT).tokens for _ in range(3)]
    assert len(set(map(tuple, answers))) == 3


def test_a_stop_token_ends_an_answer_and_is_its_last(engine):
    whole = engine.submit([1], SamplingParams(max_tokens=20, seed=1)).result(TIMEOUT)
    for place in (0, 1, 7):
        stop = whole.tokens[place]
        end = whole.tokens.index(stop) + 1
        answer = engine.submit([1], SamplingParams(max_tokens=20, seed=1, stop_tokens=(39, stop))).result(TIMEOUT)
        assert (answer.tokens, answer.finish_reason) == (whole.tokens[:end], "stop")


def test_pieces_make_up_the_answer(engine):
    pieces: list = []
    answer = engine.submit([1], SamplingParams(max_tokens=8, seed=1), pieces.append).result(TIMEOUT)
    assert [len(piece.tokens) for piece in pieces] == [1, 2, 2, 2, 1]  # one of the prefill, then `steps`
    assert [piece.finish_reason for piece in pieces] == [None] * 4 + ["length"]
    for name in ("tokens", "log_probs", "versions"):
        assert [value for piece in pieces for value in getattr(piece, name)] == getattr(answer, name)


def test_a_request_joins_while_another_is_decoded(engine):
    gate = Gate()
    long = engine.submit([1], SamplingParams(max_tokens=40), gate)
    gate.wait()
    short = engine.submit([2], SamplingParams(max_tokens=3))
    for _ in range(3):
        gate.pass_on()
        gate.wait()
    assert len(short.result(TIMEOUT).tokens) == 3
    assert not long.done and len(gate.pieces) == 4
    gate.leave_open()
    assert len(long.result(TIMEOUT).tokens) == 40


def test_new_parameters_reach_requests_under_way_and_each_token_says_its_version(engine):
    gate = Gate()
    handle = engine.submit([1], SamplingParams(max_tokens=7, seed=1), gate)
    for version in (0, 0, 5):
        gate.wait()  # tokens 1, 2 to 3, 4 to 5 are there
        assert engine.version == version - 5 * (version == 5)
        if len(gate.pieces) == 3:
            engine.set_params(5, jax.tree.map(np.asarray, weights(1)))
            assert engine.version == 5
        gate.pass_on()
    gate.leave_open()
    answer = handle.result(TIMEOUT)
    assert answer.versions == [0] * 5 + [5] * 2
    # With the cache as it was: what came before is not computed again.
    cache, none = transformer.init_cache(CONFIG, 1, 64), jnp.zeros(1, jnp.int32)
    old, cache = transformer.apply_cached(weights(), CONFIG, jnp.array([[1, *answer.tokens[:4]]]), cache, none)
    new, _ = transformer.apply_cached(weights(1), CONFIG, jnp.array([answer.tokens[4:6]]), cache, none + 5)
    expected = jax.nn.log_softmax(jnp.concatenate([old, new], axis=1))[0]
    np.testing.assert_allclose(answer.log_probs, expected[jnp.arange(7), jnp.array(answer.tokens)], atol=1e-4)


def test_the_engine_keeps_a_copy_of_its_parameters():
    params = jax.tree.map(lambda x: x + 0, weights())
    with DecodeEngine(CONFIG, params, SMALL) as engine:
        jax.tree.map(lambda leaf: leaf.delete(), params)
        assert len(engine.submit([1], SamplingParams(max_tokens=3)).result(TIMEOUT).tokens) == 3
        mine = jax.tree.map(lambda x: np.array(x), weights(1))
        engine.set_params(1, mine)
        sampling = SamplingParams(max_tokens=9, seed=0)
        before = engine.submit([1], sampling).result(TIMEOUT)
        for leaf in jax.tree.leaves(mine):
            leaf[...] = 0
        assert engine.submit([1], sampling).result(TIMEOUT) == before


def test_parameters_that_are_not_the_models_are_refused(engine):
    wrong = {**weights(1), "norm": jnp.ones(3)}
    with pytest.raises(UsageError, match=r"1 are not the model's: \['norm'\] has the shape \(3,\), expected \(16,\)"):
        engine.set_params(1, wrong)
    with pytest.raises(UsageError, match="lm_head.* has the shape"):
        engine.set_params(1, {**weights(1), "lm_head": jnp.ones((16, 40))})
    engine.set_params(4, weights(1))
    with pytest.raises(UsageError, match="has version 4 already: 3 is not above it"):
        engine.set_params(3, weights(1))


def test_parameters_that_are_not_finite_fail_their_requests_and_no_later_ones(engine):
    engine.set_params(1, jax.tree.map(lambda x: x * jnp.nan, weights()))
    with pytest.raises(UnavailableError, match="With the parameters of version 1 logits are not finite"):
        engine.submit([1], SamplingParams(max_tokens=3)).result(TIMEOUT)
    engine.set_params(2, weights())
    assert len(engine.submit([1], SamplingParams(max_tokens=3)).result(TIMEOUT).tokens) == 3


def test_a_cancelled_request_leaves_its_slot_or_the_queue():
    with DecodeEngine(CONFIG, weights(), EngineConfig(slots=1, steps=2, max_waiting=2)) as engine:
        gate = Gate()
        running = engine.submit([1], SamplingParams(max_tokens=40), gate)
        gate.wait()
        waiting = engine.submit_many([[2], [3]], SamplingParams(max_tokens=2))
        with pytest.raises(UnavailableError, match="2 requests wait for the decode engine, which lets 2 wait"):
            engine.submit([4])
        waiting[0].cancel()
        assert engine.stats()["waiting"] == 1
        other = engine.submit([4], SamplingParams(max_tokens=2))
        running.cancel()
        gate.leave_open()
        assert len(other.result(TIMEOUT).tokens) == len(waiting[1].result(TIMEOUT).tokens) == 2
        for cancelled in (running, waiting[0]):
            with pytest.raises(concurrent.futures.CancelledError):
                cancelled.result(TIMEOUT)
        assert len(gate.pieces) == 1


def test_what_on_tokens_raises_concerns_its_request_alone(engine):
    def fail(_):
        raise ValueError("mine")

    other = engine.submit([1], SamplingParams(max_tokens=9))
    with pytest.raises(ValueError, match="mine"):
        engine.submit([1], SamplingParams(max_tokens=9), fail).result(TIMEOUT)
    assert len(other.result(TIMEOUT).tokens) == 9


def test_close_leaves_nobody_waiting():
    engine = DecodeEngine(CONFIG, weights(), EngineConfig(slots=1, steps=2))
    gate = Gate()
    handles = [engine.submit([1], SamplingParams(max_tokens=40), gate), engine.submit([2])]
    gate.wait()
    with pytest.raises(PeerError, match="gave no whole answer within 0.01 s"):
        handles[0].result(timeout=0.01)
    with pytest.raises(PeerError, match="thread did not end within 0.01 s"):
        engine.close(timeout=0.01)
    for handle in handles:  # though the engine is still held
        with pytest.raises(UnavailableError, match="closed"):
            handle.result(TIMEOUT)
    gate.leave_open()
    engine.close()
    engine.close()
    assert not engine._thread.is_alive()
    with pytest.raises(UnavailableError, match="closed"):
        engine.submit([1])


def test_a_failure_of_the_device_reaches_everyone(engine, monkeypatch):
    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._slots, "decode", fail)
    handle = engine.submit([1], SamplingParams(max_tokens=9))
    with pytest.raises(UnavailableError, match="decode engine failed: RuntimeError: out of memory"):
        handle.result(TIMEOUT)
    with pytest.raises(UnavailableError, match="out of memory"):
        engine.submit([1])


def test_many_threads_get_their_own_answers(engine):
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
        ([40], SamplingParams(), "vocabulary is 0 to 39"),
        ([1] * 64, SamplingParams(), "has 64 tokens; with max_tokens 1 that is more than the 64"),
        ([1], SamplingParams(stop_tokens=tuple(range(9))), "9 stop_tokens; EngineConfig.max_stop_tokens is 8"),
    ],
)
def test_requests_that_cannot_be_answered_are_refused(engine, prompt, sampling, message):
    with pytest.raises(UsageError, match=message):
        engine.submit(prompt, sampling)


def test_an_engine_that_cannot_be_is_refused():
    with pytest.raises(UsageError, match="length is 65, more than the model's max_position_embeddings of 64"):
        DecodeEngine(CONFIG, weights(), EngineConfig(length=65))
    with pytest.raises(UsageError, match="EngineConfig.slots must be at least 1, got 0"):
        EngineConfig(slots=0)
