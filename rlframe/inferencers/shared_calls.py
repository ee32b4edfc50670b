"""Calls in shared memory: the arrays of a request and of its answer need not travel to a service on the same machine.

Each client makes memory with a slot for each call under way: the rows to act on, and room for the answer. The call
itself still goes by the transport, with its deadlines and repetitions, but holds only the slot's name:

    client   _InferencerClient.submit("inference", env_ids, timestep, state)
      slot = CallMemory.write                      the request, in slot 5 of the memory 1234: 8 rows
      Client.submit("shared_inference", 1234, 5, 8)
    service  Inferencer.shared_inference(1234, 5, 8)
      call = CallMemoryRegistry.slot(1234, 5, 8)           the same slot, mapped into the service's process
      call.write(inference(*call.request()))       the answer; it returns the version that acted
    client   slot.read(version)                    copies the answer, and frees the slot
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
from rlframe.interprocess.memory import SUPPORTED, MemoryName, SharedArrays
from rlframe.transport import Client, Future, MappedFuture
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

    - Before the first call, it waits until the inferencer has parameters. The arrays of that call travel, and its
      answer shows the shapes of later answers.
    - At the second call, it makes memory, and asks the inferencer whether it can map it.
    - After a call that failed, it makes new memory: the answer of that call may still be written to the old one.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._can_share = SUPPORTED
        self._method = ""  # that takes requests whose arrays travel; unknown before the first call
        self._answer: Tree = None  # an answer without rows; None before the first one
        self._memory: CallMemory | None = None

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See `rlframe.transport.Client`; `inference` as that of `Inferencer`."""
        if method != "inference":
            return self._client.call(method, *args, **kwargs)
        slot = self._write(args)
        return self._answer_of(slot, lambda: self._client.call(*self._message(slot, args)))

    def submit(self, method: str, /, *args: Any) -> Future:
        """See `rlframe.transport.Client`."""
        if method != "inference":
            return self._client.submit(method, *args)
        try:
            slot = self._write(args)
        except Exception as error:  # nobody answers: the future raises it
            failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
            failed.set_exception(error)
            return failed
        submitted = self._client.submit(*self._message(slot, args))
        return MappedFuture(submitted, lambda future: self._answer_of(slot, future.result))

    def _message(self, slot: _Slot | None, args: Any) -> tuple[Any, ...]:
        """Return the method to call for `inference`, and its arguments."""
        return (self._method, *args) if slot is None else ("shared_inference", *slot.name)

    def _answer_of(self, slot: _Slot | None, result: Callable[[], Any]) -> Answer:
        """Return the answer to a request, given what waits for the result of its call."""
        try:
            given = result()
            if isinstance(given, str):  # see `Inferencer.answer_inference`
                raise UnavailableError(given)
            return self._record_shapes(given) if slot is None else slot.read(given)
        except Exception:
            if slot is not None and self._memory is slot.memory:
                self._memory = None
            raise

    def _wait_for_params(self) -> None:
        """Raise UnavailableError if there are none within a second."""
        if self._method:
            return
        try:
            if not self._client.call("is_ready", 1.0):
                raise UnavailableError("The inference service has no parameters yet: its learner has not answered.")
            self._method = "answer_inference"
        except NoMethodError:
            self._method = "inference"  # not an Inferencer, but something that has `inference` too

    def _write(self, request: Any) -> _Slot | None:
        """Wait for parameters, and return the slot that the request was written to; None if it must be sent."""
        self._wait_for_params()
        if not self._can_share or self._answer is None:
            return None
        leaves, treedef = jax.tree.flatten(request)
        rows = len(leaves[0])
        here = self._memory
        if here is None or not here.fits(leaves, treedef, rows):
            if not all(isinstance(leaf, np.ndarray) and leaf.ndim and len(leaf) == rows for leaf in leaves):
                return None  # a mistake, for which the inferencer raises an error
            here = CallMemory(None, rows, treedef.unflatten([leaf[:0] for leaf in leaves]), self._answer)
            self._can_share = self._client.call("share_calls", here.name, here.capacity, here.request, here.answer)
            if not self._can_share:
                return None
            self._memory = here
        return here.write(leaves, rows)

    def _record_shapes(self, answer: Answer) -> Answer:
        """Return the answer. Keep its shape: the next call can leave room for its own."""
        if self._answer is None and self._method != "inference":
            output, state = answer
            self._answer = jax.tree.map(lambda leaf: leaf[:0], (output._replace(params_version=None), state))
        return answer


class CallMemoryRegistry:
    """The service's side: the memory of all its clients."""

    def __init__(self) -> None:
        self._memories: dict[int, CallMemory] = {}
        self._lock = threading.Lock()

    def share(self, name: MemoryName, capacity: int, request: Tree, answer: Tree) -> bool:
        """Map a client's memory. Return False if that is not possible. Unmap the memory of clients that have ended."""
        with self._lock:
            for token in [token for token, known in self._memories.items() if known.is_gone]:
                del self._memories[token]
            try:
                self._memories[name.token] = CallMemory(name, capacity, request, answer)
            except OSError:  # on another machine, or of another user
                return False
        return True

    def slot(self, token: int, number: int, rows: int) -> _Slot:
        """Return a slot of a client's memory, by its name."""
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

    def __init__(self, name: MemoryName | None, capacity: int, request: Tree, answer: Tree) -> None:
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
    def is_gone(self) -> bool:
        """Return True if the client has closed it, or died."""
        return self._shared.closed or not self._shared.creator_is_alive

    def fits(self, leaves: list[Any], treedef: Any, rows: int) -> bool:
        """Return True if a request can be written here."""
        return (
            rows <= self.capacity
            and treedef == self.request_treedef
            and all(
                type(leaf) is np.ndarray and leaf.dtype == here.dtype and leaf.shape == (rows, *here.shape[2:])
                for leaf, here in zip(leaves, self._leaves)
            )
        )

    def write(self, leaves: list[np.ndarray], rows: int) -> _Slot | None:
        """Write a request. Return its slot; None if all slots are taken."""
        try:
            slot = _Slot(self, self.free.pop(), rows)
        except IndexError:
            return None
        for here, leaf in zip(slot.arrays, leaves):
            here[...] = leaf
        return slot

    def arrays(self, number: int, rows: int) -> list[np.ndarray]:
        """Return the leaves of a slot: the request's, then the answer's."""
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
        """Return the arguments of `inference`: views, which stay as they are until it is answered."""
        treedef = self.memory.request_treedef
        return treedef.unflatten(self.arrays[: treedef.num_leaves])

    def write(self, answer: Answer) -> int:
        """Write the answer. Return the version that acted, which the call returns to the client."""
        output, state = answer
        leaves = jax.tree.leaves((output._replace(params_version=None), state))
        for here, leaf in zip(self._answer, leaves, strict=True):
            here[...] = leaf
        return output.params_version

    def read(self, version: int) -> Answer:
        """Return a copy of the answer, and free the slot."""
        output, state = self.memory.answer_treedef.unflatten([leaf.copy() for leaf in self._answer])
        self.memory.free.append(self.name[1])
        return output._replace(params_version=version), state

    @property
    def _answer(self) -> list[np.ndarray]:
        return self.arrays[self.memory.request_treedef.num_leaves :]
