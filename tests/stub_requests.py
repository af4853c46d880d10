"""Requests and waiting queues with the names of vLLM's, for the stub of its scheduler."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from enum import Enum, IntEnum
from types import SimpleNamespace
from typing import Any


class RequestStatus(IntEnum):
    WAITING = 1
    WAITING_FOR_REMOTE_KVS = 2
    RUNNING = 3
    PREEMPTED = 4
    FINISHED_STOPPED = 5
    FINISHED_LENGTH_CAPPED = 6
    FINISHED_ABORTED = 7
    FINISHED_IGNORED = 8
    FINISHED_REPETITION = 9


class PauseState(Enum):
    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class Request:
    """What the plug-in reads of a request. `output` is how many tokens the model will give it."""

    def __init__(self, name: str, prompt: int, limit: int, output: int | None = None, **words: Any) -> None:
        self.request_id, self.num_prompt_tokens, self.max_tokens = name, prompt, limit
        self.output = limit if output is None else min(output, limit)
        self.num_output_tokens = self.num_computed_tokens = self.placeholders = self.stale = 0
        self.num_preemptions = self.next_decode_eligible_step = 0
        self.is_prefill_chunk = False
        self.status = words.get("status", RequestStatus.WAITING)
        self.priority, self.arrival_time = words.get("priority", 0), words.get("arrival_time", 0.0)
        adapter = words.get("adapter")
        self.lora_request = SimpleNamespace(lora_int_id=adapter) if adapter else None
        self.sampling_params = SimpleNamespace(extra_args=words.get("extra_args"))

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output_tokens


class RequestQueue(ABC):
    @abstractmethod
    def add_request(self, request: Request) -> None: ...
    @abstractmethod
    def pop_request(self) -> Request: ...
    @abstractmethod
    def peek_request(self) -> Request: ...
    @abstractmethod
    def prepend_request(self, request: Request) -> None: ...
    @abstractmethod
    def prepend_requests(self, requests: Any) -> None: ...
    @abstractmethod
    def remove_request(self, request: Request) -> None: ...
    @abstractmethod
    def remove_requests(self, requests: Any) -> None: ...
    @abstractmethod
    def __bool__(self) -> bool: ...
    @abstractmethod
    def __len__(self) -> int: ...
    @abstractmethod
    def __iter__(self) -> Any: ...


class ListQueue(RequestQueue):
    """First come first served, or by priority and arrival."""

    def __init__(self, by_priority: bool = False) -> None:
        self.list: deque[Request] = deque()
        self.by_priority = by_priority

    def _settle(self) -> None:
        if self.by_priority:
            self.list = deque(sorted(self.list, key=lambda r: (r.priority, r.arrival_time)))

    def add_request(self, request: Request) -> None:
        self.list.append(request)
        self._settle()

    def pop_request(self) -> Request:
        return self.list.popleft()

    def peek_request(self) -> Request:
        return self.list[0]

    def prepend_request(self, request: Request) -> None:
        self.list.appendleft(request)
        self._settle()

    def prepend_requests(self, requests: Any) -> None:
        self.list.extendleft(requests)
        self._settle()

    def remove_request(self, request: Request) -> None:
        self.list.remove(request)

    def remove_requests(self, requests: Any) -> None:
        gone = set(requests)
        self.list = deque(request for request in self.list if request not in gone)

    def __bool__(self) -> bool:
        return bool(self.list)

    def __len__(self) -> int:
        return len(self.list)

    def __iter__(self) -> Any:
        return iter(self.list)
