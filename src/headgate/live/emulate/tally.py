"""What an engine has done so far, in vLLM's categories; many equal observations cost as much as one."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from math import inf

from headgate.core.policy import Steps
from headgate.live.emulate.job import Job

SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
           480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
         40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
           40.0, 80.0)  # fmt: skip
STEP_TOKENS = (1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0)
LATE = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0)
REASONS = ("stop", "length", "abort", "error", "repetition")


class Histogram:
    """Counts by bucket, and the sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """The same value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def rows(self) -> list[tuple[str, float]]:
        """Cumulative, as Prometheus wants them."""
        total, rows = 0, []
        for bound, count in zip((*self.bounds, inf), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == inf else str(bound), float(total)))
        return rows

    def quantile(self, share: float) -> float:
        """The upper bound of the bucket in which this share of the values is reached."""
        wanted, total = share * sum(self.counts), 0
        for bound, count in zip((*self.bounds, inf), self.counts, strict=True):
            total += count
            if total and total >= wanted:
                return bound
        return 0.0


def token_bounds(most: int) -> tuple[float, ...]:
    """1, 2, 5, 10, ... up to the model's length."""
    steps = (float(base * 10**power) for power in range(12) for base in (1, 2, 5))
    return tuple(bound for bound in steps if bound <= most)


class Tally:
    """Counters and histograms of one engine."""

    def __init__(self, model_len: int) -> None:
        tokens = token_bounds(model_len)
        self.time_to_first_token = Histogram(FIRST)
        self.inter_token_latency = Histogram(BETWEEN)
        self.time_per_output_token = Histogram(BETWEEN)
        self.e2e, self.queue, self.inference = Histogram(SECONDS), Histogram(SECONDS), Histogram(SECONDS)
        self.prefill, self.decode = Histogram(SECONDS), Histogram(SECONDS)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.prompt_length, self.output_length = Histogram(tokens), Histogram(tokens)
        self.max_tokens, self.computed = Histogram(tokens), Histogram(tokens)
        self.output_most = Histogram(tokens)
        self.choices = Histogram((1.0, 2.0, 5.0, 10.0, 20.0))
        self.preemptions_each = Histogram((1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0))
        self.late, self.written = Histogram(LATE), Histogram(LATE)
        self.step_seconds = 0.0
        self.prompt_tokens = self.loaded_tokens = self.generation_tokens = self.preemptions = self.steps = 0
        self.cache_queries = self.cache_hits = self.cached_tokens = 0
        self.ended_by: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.rejected: Counter[str] = Counter(max_num_queued_reqs=0, max_num_queued_tokens=0)
        self.nixl: Counter[str] = Counter()

    def stepped(self, steps: Steps) -> None:
        self.steps += len(steps.ends)
        self.step_seconds += steps.ends[-1] - steps.start
        self.step_tokens.add(float(steps.decodes + steps.prefill))

    def admitted(self, job: Job, found: int) -> None:
        """Its prompt was looked up, where there is a prefix cache; KV that was loaded was not."""
        if not job.loaded:
            job.cached = found
            self.cache_queries += job.prompt
            self.cache_hits += found

    def tokens(self, count: int) -> None:
        """So many output tokens came."""
        self.generation_tokens += count

    def gap(self, seconds: float, times: int = 1) -> None:
        """Between two tokens of a request."""
        self.inter_token_latency.add(seconds, times)

    def first_token(self, seconds: float) -> None:
        """From arrival to the first token."""
        self.time_to_first_token.add(seconds)

    def preempted(self) -> None:
        self.preemptions += 1

    def ended(self, job: Job) -> None:
        """A job has left; only those that got a token have times."""
        reason = job.reason
        self.ended_by[reason] += 1
        if job.first < 0 or reason in ("abort", "error"):
            return
        self.prompt_tokens += job.prompt
        self.loaded_tokens += job.loaded
        self.cached_tokens += job.cached
        self.prompt_length.add(job.prompt)
        self.computed.add(job.prompt - job.loaded - job.cached)
        self.output_length.add(job.made)
        self.max_tokens.add(job.limit)
        self.output_most.add(job.limit)
        self.choices.add(1)
        self.preemptions_each.add(job.evictions)
        decode = job.finished - job.first
        self.e2e.add(job.finished - job.arrival)
        self.queue.add(job.admitted - job.arrival)
        self.prefill.add(job.first - job.admitted)
        self.decode.add(decode)
        self.inference.add(job.finished - job.admitted)
        if job.made > 1:
            self.time_per_output_token.add(decode / (job.made - 1))
