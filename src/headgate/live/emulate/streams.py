"""Who gets a token from which step: an observer that hears what a recorder hears, and keeps counts."""

from __future__ import annotations

from headgate.core.policy import End, Observer, Steps
from headgate.core.request import Request
from headgate.live.emulate.job import Job
from headgate.live.emulate.tally import Tally


class Streams(Observer):
    """Collects the tokens of a step while the engine runs it; `flush` hands them out when its time has come.

    Decodes that share the engine's tick get a token in every step with decodes, so no list is kept of them
    but the set itself. Jobs whose client does not stream are counted only.
    """

    def __init__(self, tally: Tally) -> None:
        self.jobs: dict[int, Job] = {}  # all inside the engine
        self._tally = tally
        self._rolling: dict[int, Job] = {}  # get a token with every tick
        self._due: list[Job] = []  # streaming jobs with tokens from the step that has just ended
        self._ended: list[Job] = []
        self._shared = -1.0  # when the last tick was
        self._fresh: list[Job] = []  # rolling ones whose newest token did not come with that tick

    def admitted(self, request: Request, now: float) -> None:
        """Its wait in the queue is over."""
        job = self.jobs[request.id]
        if job.admitted < 0:
            job.admitted = now
            self._tally.admitted(job, request.cached)

    def stepped(self, steps: Steps) -> None:
        """A token for everyone that rolls."""
        now = steps.ends[-1]
        self._tally.stepped(steps)
        if not steps.decodes or not self._rolling:
            return
        self._tally.tokens(len(self._rolling))
        fresh, self._fresh = self._fresh, []
        for job in fresh:
            self._tally.gap(now - job.newest)
        if len(self._rolling) > len(fresh):
            self._tally.gap(now - self._shared, len(self._rolling) - len(fresh))
        self._shared = now
        self._due = [*self._due, *self._rolling.values()] if self._due else list(self._rolling.values())

    def prefilled(self, request: Request, now: float) -> None:
        """The token that came with its prompt; from now on it rolls."""
        job = self.jobs[request.id]
        self._tally.tokens(1)
        if job.first < 0:
            job.first = now
            self._tally.first_token(now - job.arrival)
        else:
            self._tally.gap(now - job.newest)
        job.newest = now
        self._rolling[job.id] = job
        self._fresh.append(job)
        self._due.append(job)

    def held(self, request: Request, now: float) -> None:
        """No token until it is resumed."""
        self._stop(request.id)

    def resumed(self, request: Request, now: float) -> None:
        """It rolls again; its next gap is its own."""
        job = self.jobs[request.id]
        self._rolling[job.id] = job
        self._fresh.append(job)

    def evicted(self, request: Request, now: float) -> None:
        """Its KV is gone; a token will come with its next prompt step."""
        self.jobs[request.id].evictions += 1
        self._tally.preempted()
        self._stop(request.id)

    def finished(self, request: Request, now: float, how: End) -> None:
        """It has left the engine."""
        job = self.jobs.pop(request.id)
        self._stop(job.id)
        job.how, job.finished = how, now
        job.made = max(job.made, request.generated)
        self._ended.append(job)

    def flush(self) -> list[Job]:
        """Hand out the tokens of the step; the jobs that have ended with it."""
        due, ended = self._due, self._ended
        self._due, self._ended = [], []
        for job in due:
            if job.how is None:
                job.made += 1
                if job.sink.streams:
                    job.sink.tokens(job)
        for job in ended:
            self._tally.ended(job)
            job.sink.end(job)
        return ended

    def fail(self, error: str) -> None:
        """The engine is dead: everybody is told."""
        jobs, self.jobs = self.jobs, {}
        for job in jobs.values():
            job.error, job.how = error, End.ABORTED
            job.sink.end(job)
        self._rolling.clear()

    def _stop(self, id: int) -> None:
        job = self._rolling.pop(id, None)
        if job is not None:
            self._forget(job)

    def _forget(self, job: Job) -> None:
        """It leaves the tick; its newest token keeps its date."""
        if job in self._fresh:
            self._fresh.remove(job)
        elif self._shared > job.newest:
            job.newest = self._shared
