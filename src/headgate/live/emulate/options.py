"""What an emulator is made of: a card, a policy, an engine's limits, and what its answers are."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

import numpy as np

from headgate.core.errors import InputError
from headgate.core.policy import BatchPolicy
from headgate.cost.card import Card, load_card
from headgate.methods.make import make_policy, split_name
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.of_card import engine_of_card
from headgate.workloads.bundled import BUNDLED, bundled
from headgate.workloads.lengths import FROM_FILE, LengthLaw, length_law
from headgate.workloads.traces import read_trace

DEFAULT_LAW, DEFAULT_MEAN = "uniform", 512.0


@dataclass(frozen=True)
class Options:
    """All that can be said of an emulator; `emulated` and `headgate emulate` take the same names."""

    card: str = "h200-qwen3-8b"
    policy: str = "mixed"  # NAME or NAME:PARAMETER=VALUE,...
    slots: int | None = None
    budget: int | None = None
    kv_tokens: int | None = None
    block: int | None = None
    model_len: int | None = None
    asynchronous: bool = False

    engines: int = 1
    ranks: bool = False  # one port for all engines, as vLLM's data-parallel ranks
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    speed: float = 1.0
    virtual: bool = False
    hold: int = 0  # with a virtual clock: run when so many requests are there

    model: str | None = None  # the name it is served by; default: the card's model
    tokenizer: str | None = None
    output: float | None = None  # mean output tokens, where the client does not decide
    output_law: str | None = None  # fixed, uniform, geometric, gamma, lognormal, lengths=FILE
    trace: str | None = None  # output lengths from a trace
    echo: bool = False

    max_queued: int | None = None  # requests that may wait, vLLM's --max-num-queued-reqs
    max_queued_tokens: int | None = None
    max_requests: int = 4096  # in flight at one port; more get 503
    max_connections: int = 10_000  # of one port
    body_limit: int = 32 * 1024 * 1024
    max_bytes: int = 256 * 1024 * 1024  # of bodies being read at one port

    kv_lease: float = 30.0  # emulated seconds that KV is kept for another engine
    kv_load_failure: str = "fail"  # or recompute
    kv_hosts: tuple[str, ...] = ()  # from which KV may be read, beside this machine
    kv_connector: bool = True
    transfer_delay: float = 0.002
    transfer_per_token: float = 147456 / 50e9

    fail_rate: float = 0.0
    fault: str = "500"  # what the failing ones get
    fault_header: bool = True
    stall_at: int | None = None
    crash_after: int | None = None
    slow_start: float = 0.0  # real seconds during which nobody listens
    shutdown_timeout: float = 30.0  # real seconds in which running requests may end after SIGTERM
    admin_port: int | None = None  # None: no admin port; 0: any free one
    admin_host: str = "127.0.0.1"
    extra: tuple[object, ...] = field(default=(), repr=False)  # more observers, for tests

    def __post_init__(self) -> None:
        if not 1 <= self.engines <= 1024:
            raise InputError(f"engines={self.engines}; give 1 to 1024")
        if self.port and not self.ranks and self.port + self.engines > 65536:
            raise InputError(
                f"port {self.port} leaves no room for {self.engines} engines; choose a lower one"
            )
        if self.kv_load_failure not in ("fail", "recompute"):
            raise InputError(f"kv_load_failure {self.kv_load_failure!r}; choose fail or recompute")
        if self.hold and not self.virtual:
            raise InputError("--hold is for a virtual clock; add --virtual or drop it")
        for name in ("kv_lease", "shutdown_timeout", "slow_start", "transfer_delay", "transfer_per_token"):
            if not 0 <= getattr(self, name) < inf:
                raise InputError(f"{name}={getattr(self, name)}; give a time of 0 s or more")
        for name in ("max_requests", "max_connections", "body_limit", "max_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}; give at least 1")


class Made:
    """Options turned into objects, checked before anything listens."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.card: Card = load_card(options.card)
        for name in ("slots", "budget", "kv_tokens", "block", "model_len"):
            value = getattr(options, name)
            if value is not None and value < 1:
                raise InputError(f"{name}={value}; give at least 1")
        self.engine: Engine = engine_of_card(
            self.card, options.slots, options.budget, options.kv_tokens, options.model_len, options.block
        )
        self.model = options.model or self.card.model
        self.lengths = OutputLengths(options)
        self.policy()

    def policy(self) -> BatchPolicy:
        """A fresh one."""
        name, settings = split_name(self.options.policy)
        return make_policy(name, settings, self.engine)[0]


class OutputLengths:
    """How long an answer is where the client does not say: the same for the same prompt, on every engine."""

    def __init__(self, options: Options) -> None:
        self.decides = bool(options.output or options.output_law or options.trace)
        self._trace: list[int] | None = None
        self._law: LengthLaw | None = None
        if options.trace is not None:
            name = options.trace
            workload = bundled(name) if name in BUNDLED else read_trace(name)[0]
            self._trace = workload.output.tolist()
        else:
            law = options.output_law or DEFAULT_LAW
            mean = options.output if law.startswith(FROM_FILE) else options.output or DEFAULT_MEAN
            self._law = length_law(law, mean)

    def draw(self, mark: int, choice: int) -> int:
        """The length of the answer to a prompt with this fingerprint."""
        generator = np.random.default_rng((mark, choice))
        if self._trace is not None:
            return self._trace[int(generator.integers(len(self._trace)))]
        assert self._law is not None
        return int(self._law.draw(1, generator)[0])
