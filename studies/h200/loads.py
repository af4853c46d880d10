"""The four workloads: how long prompts and outputs are, drawn alike for every arm."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headgate.workloads.lengths import Geometric, LengthLaw, Uniform

Lengths = npt.NDArray[np.int64]
LONGEST = 4096  # prompts and outputs of the mix are cut here
DRAWN = 20000  # requests; more than any run serves
SEED = 11


@dataclass(frozen=True)
class Load:
    """Requests in the order in which they are queued."""

    name: str
    prompts: Lengths
    outputs: Lengths
    whole: int  # requests of a run that serves all of them

    @property
    def prompt(self) -> float:
        """Mean prompt tokens."""
        return float(self.prompts.mean())

    @property
    def output(self) -> float:
        """Mean output tokens."""
        return float(self.outputs.mean())

    def under_way(self, count: int, seed: int) -> tuple[Lengths, Lengths]:
        """Prompts and outputs of requests as they are met in a busy engine at a random moment.

        Long outputs are met more often; what such a request has put out already stands in its prompt, so that
        the engine's memory is filled as it stays from the first step on.
        """
        rng = np.random.default_rng(seed)
        met = rng.choice(len(self.outputs), size=count, p=self.outputs / self.outputs.sum())
        left = rng.integers(1, self.outputs[met], endpoint=True)
        return self.prompts[met] + self.outputs[met] - left, left


PAIRS = {"512/512": (512, 512, 1500), "1024/128": (1024, 128, 1500), "128/1024": (128, 1024, 900)}
WORKLOADS = (*PAIRS, "mix")


def load(name: str, seed: int, shrink: int = 1) -> Load:
    """A workload by name: `512/512` is uniform on half to one and a half times the means.

    `mix` takes one of the three pairs at random, with geometric lengths. `shrink` divides the means.
    """
    rng = np.random.default_rng([seed, *name.encode()])
    if name != "mix":
        prompt, output, whole = PAIRS[name]
        return Load(name, _draw(Uniform(prompt // shrink), rng), _draw(Uniform(output // shrink), rng), whole)
    which = rng.integers(len(PAIRS), size=DRAWN)
    prompts = np.choose(which, [_draw(Geometric(pair[0] / shrink), rng) for pair in PAIRS.values()])
    outputs = np.choose(which, [_draw(Geometric(pair[1] / shrink), rng) for pair in PAIRS.values()])
    return Load(name, np.minimum(prompts, LONGEST), np.minimum(outputs, LONGEST), 1200)


def _draw(law: LengthLaw, rng: np.random.Generator) -> Lengths:
    return law.draw(DRAWN, rng)
