"""How much of a promised gap is planned with, learned by counting the gaps that came late."""

from __future__ import annotations

from collections.abc import Iterable

from headgate.core.build import mypyc_attr
from headgate.core.errors import InputError

LOWEST = 0.4
REVIEW = 200  # decode steps between two reviews
FEWER, MORE = 0.95, 0.005  # lowered by this factor, raised by this much
PATIENT = 0.125  # of the late gaps allowed: below this share it is raised
EXCUSED = 3  # decode steps after a change, or after a promise that could not be kept, that do not count


@mypyc_attr(serializable=True)
class Trust:
    """The share of each promised gap that a step is planned for.

    A card is some percent off and a host jitters, so a step planned for the whole gap may be late. After
    each `REVIEW` decode steps the share of late gaps is compared with what is allowed (`late`, 0.001 for a
    p99.9): above half of it trust falls by 5 percent, at once; below an eighth it rises by 0.005, up to
    where it began. Gaps that could not be kept by any step (`excuse`) do not count.
    """

    def __init__(self, value: float, late: float, learn: bool = True) -> None:
        if not 0 < value <= 1:
            raise InputError(f"keep: trust={value}; it is a share of each promised gap, above 0, at most 1")
        if not 0 < late < 1:
            raise InputError(
                f"keep: late={late}; it is the share of gaps that may be late, 0.001 for a p99.9"
            )
        self.value = value
        self._most = value
        self.late, self._learn = late, learn
        self._steps = 0
        self._gaps = self._missed = 0
        self._excused = 0
        self._seen: float | None = None  # when the newest tokens of decodes came

    def excuse(self) -> None:
        """The coming step cannot keep its promise, whatever the prices."""
        self._excused = EXCUSED

    def idle(self) -> None:
        """Nobody decodes: the next token ends no gap."""
        self._seen = None

    def tokens(self, end: float, promises: Iterable[tuple[float, int]]) -> None:
        """All decodes got a token at `end`; `promises` are (seconds, how many decodes have it)."""
        seen, self._seen = self._seen, end
        if seen is None or not self._learn:
            return
        if self._excused:
            self._excused -= 1
            return
        gap = end - seen
        for promise, count in promises:
            self._gaps += count
            if gap > promise:
                self._missed += count
        self._steps += 1
        self._review()

    def _review(self) -> None:
        """Lower trust as soon as the window cannot end well, raise it after a good one."""
        allowed = self.late * self._gaps * max(1.0, REVIEW / self._steps)  # in the whole window
        if self._missed > allowed / 2:
            self.value = max(LOWEST, self.value * FEWER)
            self._excused = EXCUSED
        elif self._steps < REVIEW:
            return
        elif self._missed <= PATIENT * allowed:
            self.value = min(self._most, self.value + MORE)
        self._steps = self._gaps = self._missed = 0
