"""Calls of an inference service on the same machine: requests and answers are exchanged in shared memory.

Each client creates memory with one slot for each concurrent call. A slot has room for the request's rows and for the
answer. The call itself still uses the transport, with its deadlines and retries, but the message contains only the
slot's name. An example with the memory 1234:

    client   _InferencerClient.submit("inference", env_ids, timestep, state)
      slot = CallMemory.write                             writes the request, with 8 rows, to slot 5 of the memory
      Client.submit("shared_inference", 1234, 5, 8)
    service  Inferencer.shared_inference(1234, 5, 8)
      call = CallMemoryRegistry.slot(1234, 5, 8)          finds the same slot, mapped into the service's process
      call.write(inference(*call.request()))              writes the answer, and returns the parameters' version
    client   slot.read(version)                           copies the answer, and frees the slot
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
_SLOTS = 64  # maximum number of concurrent calls in shared memory; further calls send their arrays


class RemoteInferencer(Remote):
    """An inferencer in another process. Its calls use shared memory if possible."""

    @classmethod
    def of(cls, remote: Remote) -> RemoteInferencer:
        """Return the same node as a `RemoteInferencer`."""
        return cls(remote._addresses, remote._name, remote._deadline, remote._stop, remote._transport)

    def _connect(self, address: str) -> Client:
        return _InferencerClient(super()._connect(address))


class _InferencerClient:
    """A client of an inferencer. It wraps the transport's client.

    - Before the first call, it waits until the inferencer has parameters. The first call sends its arrays over the
      network. Its answer shows the shapes of later answers.
    - At the second call, the client creates memory, and asks the inferencer to map it.
    - After a failed call, the client creates new memory, because a late answer may still be written to the old memory.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._can_share = SUPPORTED
        self._method = ""  # name of the method for calls that send arrays; empty before the first call
        self._answer: Tree = None  # an answer cut to zero rows, for its shapes; None before the first answer
        self._memory: CallMemory | None = None

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """See `rlframe.transport.Client`. The method `inference` has the arguments of `Inferencer.inference`."""
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
        except Exception as error:  # the call was not sent; return a future that raises the error
            failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
            failed.set_exception(error)
            return failed
        submitted = self._client.submit(*self._message(slot, args))
        return MappedFuture(submitted, lambda future: self._answer_of(slot, future.result))

    def _message(self, slot: _Slot | None, args: Any) -> tuple[Any, ...]:
        """Return (name of the remote method, its arguments...): with the slot's name, or with the arrays."""
        return (self._method, *args) if slot is None else ("shared_inference", *slot.name)

    def _answer_of(self, slot: _Slot | None, result: Callable[[], Any]) -> Answer:
        """Return the answer to a request, from its slot if there is one. `result` waits until the call returns."""
        try:
            returned = result()
            if isinstance(returned, str):  # the inferencer refused: see `Inferencer.answer_inference`
                raise UnavailableError(returned)
            return self._record_shapes(returned) if slot is None else slot.read(returned)
        except Exception:
            if slot is not None and self._memory is slot.memory:
                self._memory = None
            raise

    def _wait_for_params(self) -> None:
        """Raise UnavailableError if the inferencer has no parameters within a second."""
        if self._method:
            return
        try:
            if not self._client.call("is_ready", 1.0):
                raise UnavailableError("The inference service has no parameters yet: its learner has not answered.")
            self._method = "answer_inference"
        except NoMethodError:
            self._method = "inference"  # the node is the user's own object with an `inference` method

    def _write(self, request: Any) -> _Slot | None:
        """Wait for parameters, and write the request to a slot. Return the slot; None if the arrays must be sent."""
        self._wait_for_params()
        if not self._can_share or self._answer is None:
            return None
        leaves, treedef = jax.tree.flatten(request)
        rows = len(leaves[0])
        memory = self._memory
        if memory is None or not memory.fits(leaves, treedef, rows):
            if not all(isinstance(leaf, np.ndarray) and leaf.ndim and len(leaf) == rows for leaf in leaves):
                return None  # the arrays are wrong; if they are sent, the inferencer raises a clear error
            memory = CallMemory(None, rows, treedef.unflatten([leaf[:0] for leaf in leaves]), self._answer)
            self._can_share = self._client.call(
                "share_calls", memory.name, memory.capacity, memory.request, memory.answer
            )
            if not self._can_share:
                return None
            self._memory = memory
        return memory.write(leaves, rows)

    def _record_shapes(self, answer: Answer) -> Answer:
        """Return the answer unchanged. Record its shapes, so that the next call can create memory for answers."""
        if self._answer is None and self._method != "inference":
            output, state = answer
            self._answer = jax.tree.map(lambda leaf: leaf[:0], (output._replace(params_version=None), state))
        return answer


class CallMemoryRegistry:
    """The memories of all clients of a service. The key is the memory's token."""

    def __init__(self) -> None:
        self._memories: dict[int, CallMemory] = {}
        self._lock = threading.Lock()

    def share(self, name: MemoryName, capacity: int, request: Tree, answer: Tree) -> bool:
        """Map a client's memory. Return False if that is not possible.

        Also release the memories of clients that have exited.
        """
        with self._lock:
            for token in [token for token, memory in self._memories.items() if memory.is_gone]:
                del self._memories[token]
            try:
                self._memories[name.token] = CallMemory(name, capacity, request, answer)
            except OSError:  # the memory is on another machine, or belongs to another user
                return False
        return True

    def slot(self, token: int, number: int, rows: int) -> _Slot:
        """Return the slot `number` of the memory with this token."""
        memory = self._memories.get(token)
        if memory is None:
            raise UnavailableError("The inferencer has not mapped the memory of this call: it was restarted.")
        return _Slot(memory, number, rows)


class CallMemory:
    """A client's memory, mapped into this process.

    Args:
        name: name of an existing memory to map; None creates a new memory.
        capacity: maximum number of rows of a slot.
        request, answer: trees of arrays [0, ...]. They define shapes and dtypes of a row.

    Raises:
        OSError: the memory is not on this machine, or cannot be opened.
    """

    def __init__(self, name: MemoryName | None, capacity: int, request: Tree, answer: Tree) -> None:
        self.capacity, self.request, self.answer = capacity, request, answer
        self.request_treedef, self.answer_treedef = jax.tree.structure(request), jax.tree.structure(answer)
        leaves = jax.tree.leaves((request, answer))
        fields = {str(i): ((_SLOTS, capacity, *leaf.shape[1:]), leaf.dtype) for i, leaf in enumerate(leaves)}
        self._shared = (
            SharedArrays.create(_LABEL, fields) if name is None else SharedArrays.attach(name, _LABEL, fields)
        )
        self.name = self._shared.name
        self._leaves = list(self._shared.arrays.values())
        self.free = collections.deque(range(_SLOTS))  # numbers of free slots; only the client uses this attribute

    @property
    def is_gone(self) -> bool:
        """True if the client has closed the memory, or if its process has died."""
        return self._shared.closed or not self._shared.creator_is_alive

    def fits(self, leaves: list[Any], treedef: Any, rows: int) -> bool:
        """Return True if a request fits this memory."""
        return (
            rows <= self.capacity
            and treedef == self.request_treedef
            and all(
                type(leaf) is np.ndarray and leaf.dtype == array.dtype and leaf.shape == (rows, *array.shape[2:])
                for leaf, array in zip(leaves, self._leaves)
            )
        )

    def write(self, leaves: list[np.ndarray], rows: int) -> _Slot | None:
        """Write a request to a free slot. Return the slot; None if all slots are in use."""
        try:
            slot = _Slot(self, self.free.pop(), rows)
        except IndexError:
            return None
        for array, leaf in zip(slot.arrays, leaves):
            array[...] = leaf
        return slot

    def arrays(self, number: int, rows: int) -> list[np.ndarray]:
        """Return the arrays of a slot: first the leaves of the request, then the leaves of the answer."""
        return [leaf[number, :rows] for leaf in self._leaves]


class _Slot:
    """The slot of one call.

    Attributes:
        name: (token of the memory, number of the slot, rows).
        arrays: first the leaves of the request, then the leaves of the answer.
    """

    def __init__(self, memory: CallMemory, number: int, rows: int) -> None:
        self.memory, self.name, self.arrays = memory, (memory.name.token, number, rows), memory.arrays(number, rows)

    def request(self) -> Any:
        """Return the arguments of `inference`, as views of the slot. They do not change before the answer."""
        treedef = self.memory.request_treedef
        return treedef.unflatten(self.arrays[: treedef.num_leaves])

    def write(self, answer: Answer) -> int:
        """Write the answer to the slot. Return the parameters' version, which is sent to the client."""
        output, state = answer
        leaves = jax.tree.leaves((output._replace(params_version=None), state))
        for array, leaf in zip(self._answer, leaves, strict=True):
            array[...] = leaf
        return output.params_version

    def read(self, version: int) -> Answer:
        """Return a copy of the answer, and free the slot."""
        output, state = self.memory.answer_treedef.unflatten([leaf.copy() for leaf in self._answer])
        self.memory.free.append(self.name[1])
        return output._replace(params_version=version), state

    @property
    def _answer(self) -> list[np.ndarray]:
        return self.arrays[self.memory.request_treedef.num_leaves :]
