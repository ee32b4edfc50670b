"""The policy server: an engine that decodes, parameters that follow a learner's, and HTTP in front of them."""

from __future__ import annotations

import logging
import sys
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp

from rlframe import handles
from rlframe.errors import PeerError, UnavailableError, UsageError
from rlframe.http.serving import DRAIN, Server, address_of, listen
from rlframe.http.token_file import no_token_means
from rlframe.inferencers.refreshing import Refresher
from rlframe.language.decoding import Engine
from rlframe.language.model import ModelConfig, transformer
from rlframe.language.model.tokenizers import Tokenizer, load_tokenizer
from rlframe.language.server.config import CAN, PolicyServerConfig
from rlframe.types import Params

_log = logging.getLogger(__name__)

_END = 2 * DRAIN  # seconds for the HTTP side to end
_READY = 60.0  # seconds for it to begin


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
        self._engine: Engine | None = None
        self._seen, self._refreshes, self._taken_at = -1, 0, 0.0  # of the learner's versions
        self._learner, self._params = learner, params
        self._refresher = Refresher(learner, lambda: self._seen, self._take, cfg.learner_deadline, self._stop)
        self._failure: BaseException | None = None
        self._url = ""

    def run(self) -> None:
        """Serves until `stop()`, or the end of the Launchpad program whose node this is; then drains.

        Raises:
            UsageError: it cannot listen there; the learner's parameters are not the model's.
            PeerError: no learner answered within `learner_deadline`, and there are no parameters to answer by.
            UnavailableError: the engine failed.
        """
        if self._url:
            raise UsageError("This PolicyServer runs already, or did: make another.")
        from rlframe.language.server.app import make_app

        app = make_app(self)
        listener = listen(self.cfg.host, self.cfg.port)
        self._url = f"http://{address_of(listener)}/v1"
        server = Server(app, self.cfg.max_connections, self._greet)
        thread = threading.Thread(target=self._serve, args=(server, listener), name="policy server", daemon=True)
        try:
            if self._params is not None:
                self._take(0, self._params)
                self._params = None  # the engine has a copy
                self._seen = -1  # a learner's version 0 may be of others
            thread.start()
            with handles.stopped_by_program(self.stop):
                if self._learner is not None:
                    self._refresher.follow(self.cfg.refresh_interval, required=self._engine is None)
                else:
                    self._stop.wait()
        finally:
            self.stop()
            server.should_exit = True
            if thread.ident is not None:
                thread.join(_END)
            listener.close()
            if self._engine is not None:
                self._engine.close()
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Ends `run()`: what is under way has seconds to be answered. Any thread may call it."""
        self._stop.set()

    def url(self, timeout: float = _READY) -> str:
        """Where it is, for clients of the OpenAI API: waits until it answers there.

        Raises:
            PeerError: it did not within `timeout` seconds.
        """
        if not self._ready.wait(timeout):
            raise PeerError(f"The policy server did not listen within {timeout:g} s.")
        return self._url

    def live_engine(self) -> Engine:
        """What decodes. Raises `UnavailableError` where there are no parameters yet, or it failed."""
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

        Beside those of `Engine.stats`: learner_version (-1: not known), versions_behind, refreshes, and in seconds
        since_refresh (the parameters are that old here) and since_learner (since it was heard of); None: never.
        """
        now, engine, heard = time.monotonic(), self._engine, self._refresher.heard_at
        counts = engine.stats() if engine is not None else {"version": -1}
        return {
            **counts,
            "learner_version": self._seen if self._learner is not None else -1,
            "versions_behind": max(0, self._seen - counts["version"]),
            "refreshes": self._refreshes,
            "since_refresh": None if engine is None else now - self._taken_at,
            "since_learner": None if heard is None else now - heard,
        }

    @property
    def problem(self) -> str:
        """Why the learner is not followed just now; empty while it is."""
        return self._refresher.problem

    def _take(self, version: int, params: Params) -> None:
        known, self._seen = self._seen, version
        if self._engine is None:
            self._check(params)
            self._engine = Engine(self.model_config, params, self.cfg.engine, version=version, seed=self.cfg.seed)
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

    def _greet(self) -> None:
        if self.cfg.no_token:
            print(no_token_means(CAN), file=sys.stderr, flush=True)
        root = self._url.removesuffix("/v1")
        print(f"Policy at {self._url}  (model {self.cfg.model_name!r}, endpoints: {root}/docs)", flush=True)
        self._ready.set()

    def _serve(self, server: Server, listener: Any) -> None:
        try:
            server.run(sockets=[listener])
        except BaseException as error:
            self._fail(error)
        self.stop()

    def _fail(self, error: BaseException) -> None:
        if not self._stop.is_set():
            self._failure = error
            self.stop()
