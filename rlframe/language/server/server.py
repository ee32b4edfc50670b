"""The policy server: an HTTP server with a decode engine, which uses the learner's newest parameters."""

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

_READY = 60.0  # maximum seconds until the server listens


@dataclasses.dataclass(frozen=True)
class PolicyServerConfig(ServiceConfig):
    """Options of a policy server: its address, its limits, and how often it fetches the learner's parameters."""

    can: ClassVar[str] = "use the model"

    port: int = 8001  # 0: any free port
    model_name: str = "policy"  # requests must contain this model name
    request_timeout: float = 600.0  # maximum seconds for all answers to a request
    refresh_interval: float = 0.02  # seconds between two requests for the learner's parameters
    learner_deadline: float = handles.DEADLINE  # maximum seconds without an answer from a remote learner
    seed: int = 0  # the engine uses it to draw seeds for requests without a seed
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)  # sizes of the decode engine

    def __post_init__(self) -> None:
        super().__post_init__()
        check_above(self, 0, "request_timeout", "refresh_interval", "learner_deadline")


class PolicyServer:
    """An HTTP server that samples completions with a learner's newest parameters. `run()` serves until `stop()`.

    New parameters do not interrupt requests. If the learner dies, the server continues with the last parameters.

    Args:
        cfg: See `PolicyServerConfig`.
        model_config: Architecture of the model.
        tokenizer: A tokenizer, or a name for `load_tokenizer`. A name can be sent to another process.
        learner: A learner of this model, or a handle to a learner. None means that `params` never change.
        params: Parameters to use until the learner answers. They have version 0.

    Raises:
        UsageError: Both the learner and the parameters are None, or the tokenizer does not match the model.
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
            raise UsageError("A PolicyServer needs a learner or parameters.")
        self.cfg, self.model_config = cfg, model_config
        self.tokenizer: Tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        if self.tokenizer.vocab_size > model_config.vocab_size:
            raise UsageError(
                f"The tokenizer has {self.tokenizer.vocab_size} tokens, but the model has only "
                f"{model_config.vocab_size}. Use the model's tokenizer."
            )
        self._stop, self._ready = threading.Event(), threading.Event()
        self._engine: DecodeEngine | None = None
        self._learner_version, self._refreshes, self._params_set_at = -1, 0, 0.0
        self._learner, self._params = learner, params
        self._refresher = Refresher(
            learner,
            lambda: self._learner_version,
            lambda version, packed: self._set_params(version, packed.unpack_numpy()),
            cfg.learner_deadline,
            self._stop,
        )
        self._failure: BaseException | None = None
        self._url = ""

    def run(self) -> None:
        """Serve until `stop()` is called or the program of this node stops. Then finish the running requests.

        Raises:
            UsageError: The server cannot listen, or the learner's parameters do not fit the model.
            PeerError: The learner did not answer within `learner_deadline`, and there are no parameters to serve.
            UnavailableError: The engine failed.
        """
        if self._url:
            raise UsageError("A PolicyServer can run only once. Make a new one.")
        from rlframe.language.server.app import make_app

        try:
            if self._params is not None:
                self._set_params(0, self._params)
                self._params = None  # free this memory, because the engine has a copy
                self._learner_version = -1  # -1, because the learner's version 0 can differ from `params`
            cfg, app = self.cfg, make_app(self)
            with (
                ServerThread(app, cfg.host, cfg.port, cfg.max_connections, ended=self.stop) as serving,
                handles.stop_with_program(self.stop),
            ):
                self._announce(serving.url)
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
        """End `run()`. Running requests have several seconds to finish. Any thread may call this method."""
        self._stop.set()

    def url(self, timeout: float = _READY) -> str:
        """Wait until the server listens, and return its URL for clients of the OpenAI API.

        Raises:
            PeerError: The server did not listen within `timeout` seconds.
        """
        if not self._ready.wait(timeout):
            raise PeerError(f"The policy server did not listen within {timeout:g} s.")
        return self._url

    def live_engine(self) -> DecodeEngine:
        """Return the engine. Raise `UnavailableError` if there are no parameters yet, or if the engine failed."""
        # This is not a property, because it raises at first, and the transport reads all properties of a served object.
        if self._engine is None:
            raise UnavailableError("The policy server has no parameters yet: its learner has not answered.")
        if self._engine.closed:
            error = UnavailableError(self._engine.closed)
            self._fail(error)  # end this process, so that a supervisor restarts it
            raise error
        return self._engine

    def stats(self) -> dict[str, Any]:
        """Return the counters of `DecodeEngine.stats`, and these values about the parameters.

        learner_version (-1 if unknown), versions_behind, refreshes, since_refresh (seconds since the last update of the
        parameters; None before the first), since_learner (seconds since the learner's last answer; None before the
        first), problem (reason why no newer parameters can be fetched; None if they can).
        """
        now, engine, heard = time.monotonic(), self._engine, self._refresher.last_answer_at
        counts = engine.stats() if engine is not None else {"version": -1}
        return {
            **counts,
            "learner_version": self._learner_version if self._learner is not None else -1,
            "versions_behind": max(0, self._learner_version - counts["version"]),
            "refreshes": self._refreshes,
            "since_refresh": None if engine is None else now - self._params_set_at,
            "since_learner": None if heard is None else now - heard,
            "problem": self._refresher.problem or None,
        }

    def _set_params(self, version: int, params: Params) -> None:
        known, self._learner_version = self._learner_version, version
        if self._engine is None:
            self._check(params)
            self._engine = DecodeEngine(self.model_config, params, self.cfg.engine, version=version, seed=self.cfg.seed)
        elif version < self._engine.version:
            _log.warning(
                "The learner restarted: its version is %d after %d. The policy server continues with version %d until "
                "the learner has a newer version. To use the learner's parameters now, restart the policy server.",
                *(version, known, self._engine.version),
            )
            return
        else:
            self._engine.set_params(version, params)
        self._refreshes += 1
        self._params_set_at = time.monotonic()

    def _check(self, params: Params) -> None:
        expected = jax.eval_shape(lambda: transformer.init(jax.random.key(0), self.model_config))
        if jax.tree.map(jnp.shape, params) != jax.tree.map(jnp.shape, expected):
            raise UsageError("The parameters do not fit the policy server's model. The learner trains another model.")

    def _announce(self, url: str) -> None:
        self._url = f"{url}/v1"
        warn_no_token(self.cfg.no_token, self.cfg.can)
        print(f"Policy at {self._url}  (model {self.cfg.model_name!r}, endpoints: {url}/docs)", flush=True)
        self._ready.set()

    def _fail(self, error: BaseException) -> None:
        if not self._stop.is_set():
            self._failure = error
            self.stop()
