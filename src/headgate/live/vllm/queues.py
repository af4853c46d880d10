"""vLLM's waiting queue with a gate: while it is shut only a plan's requests are seen, in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.request import Request

FEW = 64  # so many that were taken may always stay in vLLM's queue
SHARE = 0.25  # of those that wait: so many more may
NOTHING: deque[Request] = deque()  # no request is taken from it or added


@dataclass(slots=True)
class QueueGate:
    """Of all queues of an engine. Shut: no request that waits can be seen."""

    shut: bool = False


class GatedQueue(RequestQueue):
    """Wraps one of vLLM's own queues and keeps its order; `shut` narrows it for the time of one step.

    While shut, looking and taking see only the given requests. Taking from the middle of vLLM's queue costs a
    walk through it. So those taken stay in it, unseen, until they have come to its head, or until they are
    a good part of it: then all leave in one walk. Its length stays true.
    """

    def __init__(self, inner: RequestQueue, gate: QueueGate) -> None:
        self._inner, self._gate = inner, gate
        self.members: set[Request] = set(inner)
        self.visible: deque[Request] | None = None  # None: all; while shut, those the plan names
        self.taken: dict[Request, None] = {}  # since it was shut, in the order they were taken
        self._gone: set[Request] = set()  # taken before that and still in vLLM's queue, never at its head

    def shut(self, requests: Iterable[Request]) -> None:
        members = self.members
        self.visible = deque([request for request in requests if request in members])

    def open(self) -> None:
        self.visible = None
        if not self.taken:
            return
        self._gone.update(self.taken)
        self.taken = {}
        self._clear_head()
        if len(self._gone) > max(FEW, SHARE * len(self.members)):
            self._inner.remove_requests(self._gone)
            self._gone = set()

    def _clear_head(self) -> None:
        gone, inner = self._gone, self._inner
        while gone and inner and inner.peek_request() in gone:
            gone.discard(inner.pop_request())

    def put_back(self, queued: set[Request]) -> list[Request]:
        """Where they were, unless `queued` elsewhere by now; all can be seen again."""
        back = [request for request in self.taken if request not in queued]
        for request in back:
            del self.taken[request]
        self.members.update(back)
        self.open()
        return back

    def peek_request(self) -> Request:
        self._refuse_if_shut()
        return self._inner.peek_request() if self.visible is None else self.visible[0]

    def pop_request(self) -> Request:
        self._refuse_if_shut()
        if self.visible is None:
            request = self._inner.pop_request()
            self._clear_head()
        else:
            request = self.visible.popleft()
            self.taken[request] = None
        self.members.discard(request)
        return request

    def add_request(self, request: Request) -> None:
        self._settle(request)
        self.members.add(request)
        self._inner.add_request(request)

    def prepend_request(self, request: Request) -> None:
        self._settle(request)
        self.members.add(request)
        self._inner.prepend_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        back = list(requests)
        self._settle(*back)
        self.members.update(back)
        self._inner.prepend_requests(back)

    def remove_request(self, request: Request) -> None:
        self.remove_requests((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        gone = self.members.intersection(requests)
        if not gone:
            return
        self.members -= gone
        self._inner.remove_requests(gone)
        self._clear_head()
        if self.visible is not None:
            self.visible = deque(request for request in self.visible if request not in gone)

    def _refuse_if_shut(self) -> None:
        if self._gate.shut:
            raise IndexError("no request can be seen in this step")

    def _settle(self, *back: Request) -> None:
        again = {request for request in back if request in self.taken or request in self._gone}
        if not again:
            return
        for request in again:
            self.taken.pop(request, None)
        self._gone -= again
        self._inner.remove_requests(again)
        self._clear_head()

    def __bool__(self) -> bool:
        if self._gate.shut:
            return False
        return bool(self.members if self.visible is None else self.visible)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Request]:
        if not self.taken and not self._gone:
            return iter(self._inner)
        return iter([request for request in self._inner if request in self.members])
