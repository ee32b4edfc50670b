"""What a Learner publishes: its newest parameters, and how other processes of the machine read them where they lie."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import jax

from rlframe.errors import NoMethodError, StoppedError, UnavailableError, UsageError
from rlframe.interprocess.memory import SUPPORTED
from rlframe.params.packing import PackedParams, Packing
from rlframe.params.shared import SharedParamStore
from rlframe.params.source import NewestParams, unpacked
from rlframe.params.store import PolicySource
from rlframe.transport import Client, Future

_POLICY = "main"


class Publication(NewestParams):
    """The newest version, also where other processes of this machine read it. Who asks waits for no update.

    Args:
        packing: of the parameters for acting.
        version: the first.
        packed: its arrays, as `packing` has them; no update may donate them.
    """

    def __init__(self, packing: Packing, version: int, packed: list[jax.Array]) -> None:
        super().__init__()
        self._packing = packing
        self._lock = threading.Lock()
        self._shared: SharedParamStore | None = None  # once another process of this machine has asked for it
        self._writer: threading.Thread | None = None
        self.publish(version, packed)

    def publish(self, version: int, packed: list[jax.Array]) -> None:
        """Puts a newer version in the place of the last; or the one that a checkpoint has, before anybody has read."""
        self.put(version, PackedParams(self._packing, packed))
        with self._lock:
            if self._shared is not None:
                self._shared.offer(_POLICY, version)

    def shared(self) -> PolicySource | None:
        """Where processes of this machine read the newest version; None where there is no such memory, or any more."""
        with self._lock:
            if self._shared is None and SUPPORTED:
                self._shared = SharedParamStore(self._packing, (_POLICY,), kept=1)
                self._shared.offer(_POLICY, self.version)
                self._writer = threading.Thread(target=self._answer, name="rlframe parameters", daemon=True)
                self._writer.start()
            return self._shared.source(_POLICY) if self._shared is not None and self._writer is not None else None

    def close(self) -> None:
        """Ends the thread that writes to shared memory; readers ask the learner from then on. May be called again."""
        if self._writer is not None and self._shared is not None:
            writer, self._writer = self._writer, None
            self._shared.close()
            writer.join()

    def _answer(self) -> None:
        assert self._shared is not None
        with contextlib.suppress(StoppedError):  # closed while it was putting
            self._shared.answer(_POLICY, self)


class LearnerClient:
    """A client of a learner, whose parameters are read from shared memory where they lie there. It wraps one.

    Whether they do is asked at the first call, and again when a learner that shared them has gone.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._asks = self._packs = True
        self._shared: PolicySource | None = None

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See `rlframe.transport.Client`; `get_packed` works with a node that has only `get_params`, too."""
        if method == "get_packed":
            return self._get_packed(*args, **kwargs)
        if method == "get_params":
            return unpacked(self._get_packed(*args, **kwargs))
        return self._client.call(method, *args, **kwargs)

    def submit(self, method: str, /, *args: Any) -> Future:
        """See `rlframe.transport.Client`; parameters that are asked for in this way travel."""
        return self._client.submit(method, *args)

    def _get_packed(self, known_version: int = -1) -> tuple[int, PackedParams | None]:
        if self._asks:
            self._shared = self._find()
            self._asks = False
        if self._shared is not None:
            version, packed = (-1, None) if self._shared.store.has_gone else self._shared.get_packed(known_version)
            if version == known_version != -1 or (packed is not None and version > known_version):
                return version, packed
            self._shared, self._asks = None, True
        try:
            if self._packs:
                return self._client.call("get_packed", known_version)
        except NoMethodError:  # not a Learner, but something that has `get_params`
            self._packs = False
        version, params = self._client.call("get_params", known_version)
        return version, None if params is None else PackedParams.of(params)

    def _find(self) -> PolicySource | None:
        try:
            shared = self._client.call("shared_params")
        except NoMethodError:  # not a Learner
            return None
        try:
            return None if shared is None or shared.store.has_gone else shared
        except (UnavailableError, UsageError):  # on another machine or Ray node, or of another user
            return None
