"""Options turned into objects: a card, an engine, a policy, lengths of answers."""

from __future__ import annotations

from typing import Any

import numpy as np

from headgate.core.policy import BatchPolicy
from headgate.cost.card import Card, load_card
from headgate.live.emulate.options import Options
from headgate.methods.make import make_policy, split_name
from headgate.sim.engine.engine import Engine
from headgate.sim.engine.of_card import engine_of_card
from headgate.workloads.bundled import BUNDLED, bundled
from headgate.workloads.lengths import FROM_FILE, LengthLaw, length_law
from headgate.workloads.traces import read_trace

DEFAULT_LAW, DEFAULT_MEAN = "uniform", 512.0


class Made:
    """Options turned into objects, checked before anything listens."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.card: Card = load_card(options.card)
        self.engine: Engine = engine_of_card(
            self.card, options.slots, options.budget, options.kv_tokens, options.model_len, options.block
        )._replace(prefix_cache=options.prefix_cache)
        asked = options.asynchronous
        self.asynchronous = self.card.host is not None if asked is None else asked
        self.model = options.model or self.card.model
        self.lengths = OutputLengths(options)
        _, self.parameters = self._policy()

    def policy(self) -> BatchPolicy:
        """One that no engine has used."""
        return self._policy()[0]

    def _policy(self) -> tuple[BatchPolicy, dict[str, Any]]:
        name, settings = split_name(self.options.policy)
        return make_policy(name, settings, self.engine)


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
