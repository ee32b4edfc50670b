"""Calls in shared memory: what a service on the same machine is asked, and what it answers, need not travel.

A client has memory of its own, with a slot for each call under way: the rows to act on, and room for the answer. The
call itself still goes by the transport, with its deadlines and repetitions, but says only which slot is meant.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rlframe.errors import NoMethodError, UnavailableError
from rlframe.handles import Remote
from rlframe.interprocess.memory import SUPPORTED, Name, SharedArrays
from rlframe.transport import Client, Derived, Future
from rlframe.types import AgentOutput, AgentState, Tree

Answer = tuple[AgentOutput, AgentState]

_LABEL = "rlframe-calls"
_SLOTS = 64  # calls under way; one that finds no slot sends its arrays. A slot that nobody used takes no memory


class RemoteInferencer(Remote):
    """An inferencer in another process, whose calls are in shared memory where they can be."""

    @classmethod
    def of(cls, remote: Remote) -> RemoteInferencer:
        """Return the same node, called like this."""
        return cls(remote._addresses, remote._name, remote._deadline, remote._stop, remote._transport)

    def _connect(self, address: str) -> Client:
        return _InferencerClient(super()._connect(address))


class _InferencerClient:
    """A client of an inferencer around the transport's.

    Before the first call it waits for the inferencer to have parameters. That call travels whole and shows what answers
    look like. Whether the inferencer finds this process's memory is asked at the second; and anew, for other memory,
    after a call that failed: its answer may yet come.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._can_share = SUPPORTED
        self._method = ""  # that answers; unknown before the first call
        self._answer: Tree = None  # of no rows
        self._memory: CallMemory | None = None

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See `rlframe.transport.Client`; `inference` as that of `Inferencer`."""
        if method != "inference":
            return self._client.call(method, *args, **kwargs)
        method, args, answer = self._request(args)
        return answer(lambda: self._client.call(method, *args))

    def submit(self, method: str, /, *args: Any) -> Future:
        """See `rlframe.transport.Client`."""
        if method != "inference":
            return self._client.submit(method, *args)
        try:
            method, args, answer = self._request(args)
        except Exception as error:  # nobody answers: who waits for it hears that
            failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
            failed.set_exception(error)
            return failed
        return Derived(self._client.submit(method, *args), lambda future: answer(future.result))

    def _request(self, args: Any) -> tuple[str, Any, Callable[[Callable[[], Any]], Answer]]:
        """Return the method to call for `inference`, its arguments, and what makes the answer from its result."""
        self._wait_for_params()
        slot = self._write(args)
        if slot is None:
            return self._method, args, lambda result: self._note(result())
        return "shared_inference", slot.name, lambda result: self._read(slot, result)

    def _wait_for_params(self) -> None:
        """Raises UnavailableError where there are none within a second."""
        if self._method:
            return
        try:
            if not self._client.call("is_ready", 1.0):
                raise UnavailableError("The inference service has no parameters yet: its learner has not answered.")
            self._method = "answer_inference"
        except NoMethodError:
            self._method = "inference"  # not an Inferencer, but something that has `inference` too

    def _write(self, request: Any) -> _Slot | None:
        """The slot that the request was written to; None where it must be sent."""
        if not self._can_share or self._answer is None:
            return None
        leaves, treedef = jax.tree.flatten(request)
        rows = len(leaves[0])
        here = self._memory
        if here is None or not here.fits(leaves, treedef, rows):
            if not all(isinstance(leaf, np.ndarray) and leaf.ndim and len(leaf) == rows for leaf in leaves):
                return None  # a mistake, which the inferencer has words for
            here = CallMemory(None, rows, treedef.unflatten([leaf[:0] for leaf in leaves]), self._answer)
            self._can_share = self._client.call("share_calls", here.name, here.capacity, here.request, here.answer)
            if not self._can_share:
                return None
            self._memory = here
        return here.write(leaves, rows)

    def _note(self, given: Answer | str) -> Answer:
        answer: Answer = _given(given)
        if self._answer is None and self._method != "inference":
            output, state = answer
            self._answer = jax.tree.map(lambda leaf: leaf[:0], (output._replace(params_version=None), state))
        return answer

    def _read(self, slot: _Slot, version: Callable[[], Any]) -> Answer:
        try:
            return slot.read(_given(version()))
        except Exception:
            if self._memory is slot.memory:
                self._memory = None
            raise


def _given(answer: Any) -> Any:
    """The answer; raises UnavailableError where it is the reason why there is none."""
    if isinstance(answer, str):
        raise UnavailableError(answer)
    return answer


class CallReader:
    """The service's side: the memory of all its clients."""

    def __init__(self) -> None:
        self._memories: dict[int, CallMemory] = {}
        self._lock = threading.Lock()

    def share(self, name: Name, capacity: int, request: Tree, answer: Tree) -> bool:
        """Whether this memory can be read from now on. Lets go of that of clients that have."""
        with self._lock:
            for token in [token for token, known in self._memories.items() if known.has_gone]:
                del self._memories[token]
            try:
                self._memories[name.token] = CallMemory(name, capacity, request, answer)
            except OSError:  # on another machine, or of another user
                return False
        return True

    def slot(self, token: int, number: int, rows: int) -> _Slot:
        """Where a call is."""
        known = self._memories.get(token)
        if known is None:
            raise UnavailableError("The inferencer was not shown the memory of this call: it was restarted.")
        return _Slot(known, number, rows)


class CallMemory:
    """The memory of a client, mapped into this process.

    Args:
        name: where it is found; None: it is made here.
        capacity: rows of a slot.
        request, answer: trees of arrays of no rows, [0, ...].

    Raises:
        OSError: it is not on this machine, or not to be had.
    """

    def __init__(self, name: Name | None, capacity: int, request: Tree, answer: Tree) -> None:
        self.capacity, self.request, self.answer = capacity, request, answer
        self.request_treedef, self.answer_treedef = jax.tree.structure(request), jax.tree.structure(answer)
        leaves = jax.tree.leaves((request, answer))
        fields = {str(i): ((_SLOTS, capacity, *leaf.shape[1:]), leaf.dtype) for i, leaf in enumerate(leaves)}
        self._shared = (
            SharedArrays.create(_LABEL, fields) if name is None else SharedArrays.attach(name, _LABEL, fields)
        )
        assert self._shared.name is not None
        self.name = self._shared.name
        self._leaves = list(self._shared.arrays.values())
        self.free = collections.deque(range(_SLOTS))  # slots; the client's alone

    @property
    def has_gone(self) -> bool:
        """Whether the client has closed it, or died."""
        return self._shared.closed or not self._shared.creator_is_alive

    def fits(self, leaves: list[Any], treedef: Any, rows: int) -> bool:
        """Whether a request can be written here."""
        return (
            rows <= self.capacity
            and treedef == self.request_treedef
            and all(
                type(leaf) is np.ndarray and leaf.dtype == here.dtype and leaf.shape == (rows, *here.shape[2:])
                for leaf, here in zip(leaves, self._leaves)
            )
        )

    def write(self, leaves: list[np.ndarray], rows: int) -> _Slot | None:
        """The slot that a request was written to; None where all are taken."""
        try:
            slot = _Slot(self, self.free.pop(), rows)
        except IndexError:
            return None
        for here, leaf in zip(slot.arrays, leaves):
            here[...] = leaf
        return slot

    def arrays(self, number: int, rows: int) -> list[np.ndarray]:
        """The leaves of a slot: the request's, then the answer's."""
        return [leaf[number, :rows] for leaf in self._leaves]


class _Slot:
    """One call.

    Attributes:
        name: (token of the memory, number of the slot, rows).
        arrays: the leaves of the request, then those of the answer.
    """

    def __init__(self, memory: CallMemory, number: int, rows: int) -> None:
        self.memory, self.name, self.arrays = memory, (memory.name.token, number, rows), memory.arrays(number, rows)

    def request(self) -> Any:
        """The arguments of `inference`: views, which stay as they are until it is answered."""
        treedef = self.memory.request_treedef
        return treedef.unflatten(self.arrays[: treedef.num_leaves])

    def write(self, answer: Answer) -> int:
        """Leaves the answer to the client, but for what it returns: the version that acted."""
        output, state = answer
        leaves = jax.tree.leaves((output._replace(params_version=None), state))
        for here, leaf in zip(self._answer, leaves, strict=True):
            here[...] = leaf
        return output.params_version

    def read(self, version: int) -> Answer:
        """The answer, copied. The slot is free from then on."""
        output, state = self.memory.answer_treedef.unflatten([leaf.copy() for leaf in self._answer])
        self.memory.free.append(self.name[1])
        return output._replace(params_version=version), state

    @property
    def _answer(self) -> list[np.ndarray]:
        return self.arrays[self.memory.request_treedef.num_leaves :]
