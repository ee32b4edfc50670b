"""The policy server: an engine that decodes, parameters that follow a learner's, and HTTP in front of them."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from rlframe import handles
from rlframe.errors import PeerError, UnavailableError, UsageError, check_above
from rlframe.http.config import ServiceConfig, warn_no_token
from rlframe.http.serving import ServerThread
from rlframe.language.decoding import DecodeEngine, EngineConfig
from rlframe.language.model import ModelConfig, transformer
from rlframe.language.model.tokenizers import Tokenizer, load_tokenizer
from rlframe.params.reader import Refresher
from rlframe.types import Params

_log = logging.getLogger(__name__)

_READY = 60.0  # seconds for it to begin


@dataclasses.dataclass(frozen=True)
class PolicyServerConfig(ServiceConfig):
    """Address and limits of a policy server, and how it follows its learner."""

    can: ClassVar[str] = "have the model answer"

    port: int = 8001  # 0: one that is free
    model_name: str = "policy"  # that requests have to ask for
    request_timeout: float = 600.0  # seconds for an answer
    refresh_interval: float = 0.02  # seconds between two looks at the learner's parameters
    learner_deadline: float = handles.DEADLINE  # seconds that a learner in another process may be out of reach
    seed: int = 0  # of the requests that name none
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)  # how much is decoded at once

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(self, 0, "request_timeout", "refresh_interval", "learner_deadline")


class PolicyServer:
    """Answers completions over HTTP by a learner's newest parameters, while `run()` goes on.

    An Inferencer of token sequences: parameters come by the same path, and change without a request being dropped. A
    learner that is gone stops no answers.

    Args:
        cfg: see `PolicyServerConfig`.
        model_config: the model.
        tokenizer: or what `load_tokenizer` takes; by name it may go to another process.
        learner: as the Inferencer's: a learner of such models, or a handle to one; None: `params` stay.
        params: what answers, as version 0, until the learner has said what it has.

    Raises:
        UsageError: there is neither a learner nor parameters, or the tokenizer cannot be.
    """

    def __init__(
        self,
        cfg: PolicyServerConfig,
        model_config: ModelConfig,
        tokenizer: Tokenizer | str,
        learner: Any = None,
        params: Params | None = None,
    ) -> None:
        if learner is None and params is None:
            raise UsageError("A PolicyServer needs a learner, or parameters.")
        self.cfg, self.model_config = cfg, model_config
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        if self.tokenizer.vocab_size > model_config.vocab_size:
            raise UsageError(
                f"The tokenizer has {self.tokenizer.vocab_size} tokens, the model {model_config.vocab_size}: they do "
                "not belong to each other."
            )
        self._stop, self._ready = threading.Event(), threading.Event()
        self._engine: DecodeEngine | None = None
        self._seen, self._refreshes, self._taken_at = -1, 0, 0.0  # of the learner's versions
        self._learner, self._params = learner, params
        self._refresher = Refresher(
            learner,
            lambda: self._seen,
            lambda version, packed: self._take(version, packed.unpack_numpy()),
            cfg.learner_deadline,
            self._stop,
        )
        self._failure: BaseException | None = None
        self._url = ""

    def run(self) -> None:
        """Serve until `stop()`, or the end of the program whose node this is; then drain.

        Raises:
            UsageError: it cannot listen there; the learner's parameters are not the model's.
            PeerError: no learner answered within `learner_deadline`, and there are no parameters to answer by.
            UnavailableError: the engine failed.
        """
        if self._url:
            raise UsageError("This PolicyServer runs already, or did: make another.")
        from rlframe.language.server.app import make_app

        try:
            if self._params is not None:
                self._take(0, self._params)
                self._params = None  # the engine has a copy
                self._seen = -1  # a learner's version 0 may be of others
            cfg, app = self.cfg, make_app(self)
            with (
                ServerThread(app, cfg.host, cfg.port, cfg.max_connections, ended=self.stop) as serving,
                handles.stop_with_program(self.stop),
            ):
                self._greet(serving.url)
                if self._learner is not None:
                    self._refresher.follow(cfg.refresh_interval, required=self._engine is None)
                else:
                    self._stop.wait()
        finally:
            self.stop()
            if self._engine is not None:
                self._engine.close()
        if failure := self._failure or serving.failure:
            raise failure

    def stop(self) -> None:
        """End `run()`: what is under way has seconds to be answered. Any thread may call it."""
        self._stop.set()

    def url(self, timeout: float = _READY) -> str:
        """Return its URL for clients of the OpenAI API, once it answers there.

        Raises:
            PeerError: it did not within `timeout` seconds.
        """
        if not self._ready.wait(timeout):
            raise PeerError(f"The policy server did not listen within {timeout:g} s.")
        return self._url

    def live_engine(self) -> DecodeEngine:
        """Return the engine. Raise `UnavailableError` if there are no parameters yet, or if it failed."""
        # No property: a server would read it before there are.
        if self._engine is None:
            raise UnavailableError("The policy server has no parameters yet: its learner has not answered.")
        if self._engine.closed:
            error = UnavailableError(self._engine.closed)
            self._fail(error)  # who watches over the process can start it again
            raise error
        return self._engine

    def stats(self) -> dict[str, Any]:
        """The engine's counts, and how far the parameters are behind the learner's.

        Beside those of `DecodeEngine.stats`: learner_version (-1: not known), versions_behind, refreshes, and in
        seconds since_refresh (the parameters are that old here) and since_learner (since it was heard of); None: never.
        And problem: why the learner is not followed just now; None while it is.
        """
        now, engine, heard = time.monotonic(), self._engine, self._refresher.last_answer_at
        counts = engine.stats() if engine is not None else {"version": -1}
        return {
            **counts,
            "learner_version": self._seen if self._learner is not None else -1,
            "versions_behind": max(0, self._seen - counts["version"]),
            "refreshes": self._refreshes,
            "since_refresh": None if engine is None else now - self._taken_at,
            "since_learner": None if heard is None else now - heard,
            "problem": self._refresher.problem or None,
        }

    def _take(self, version: int, params: Params) -> None:
        known, self._seen = self._seen, version
        if self._engine is None:
            self._check(params)
            self._engine = DecodeEngine(self.model_config, params, self.cfg.engine, version=version, seed=self.cfg.seed)
        elif version < self._engine.version:
            _log.warning(
                "The learner's version %d follows %d: it began anew. The policy server goes on with version %d until "
                "the learner has passed that; start it again to have the new one's.",
                *(version, known, self._engine.version),
            )
            return
        else:
            self._engine.set_params(version, params)
        self._refreshes += 1
        self._taken_at = time.monotonic()

    def _check(self, params: Params) -> None:
        expected = jax.eval_shape(lambda: transformer.init(jax.random.key(0), self.model_config))
        if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, expected):
            raise UsageError("The parameters are not those of the policy server's model: another model is learned.")

    def _greet(self, url: str) -> None:
        self._url = f"{url}/v1"
        warn_no_token(self.cfg.no_token, self.cfg.can)
        print(f"Policy at {self._url}  (model {self.cfg.model_name!r}, endpoints: {url}/docs)", flush=True)
        self._ready.set()

    def _fail(self, error: BaseException) -> None:
        if not self._stop.is_set():
            self._failure = error
            self.stop()
