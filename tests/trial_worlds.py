"""Trials in virtual time: a policy that hands the engine over block by block, and the books of it."""

from __future__ import annotations

from collections import namedtuple
from itertools import islice

import numpy as np

import headgate
from headgate.core.policy import BatchPolicy
from headgate.core.request import MEAN, Slo
from headgate.live.trial.book import Block, Book, Listener, judge
from headgate.methods.make import make_policy, split_name
from headgate.stats.switchback import KEPT, Looks, in_rounds
from headgate.workloads.traces import bundled
from headgate.workloads.workload import Kind, Workload

PROMISE = Slo(0.5, 0.1)
JUDGED = Slo(0.5, 0.1, MEAN)  # the known answers were found with the mean
Limits = namedtuple("Limits", "running batch_tokens cost width")


class Switch(BatchPolicy):
    """A fresh policy takes over at each switch, as with a changed settings file."""

    def __init__(self, arms, block, order, limits):
        self._arms, self._block, self._order, self._limits = arms, block, order, limits
        self._end, self._arm = 0.0, order[0]
        self._now = self._make(self._arm)

    def _make(self, arm):
        return make_policy(*split_name(self._arms[arm]), self._limits)[0]

    def arrived(self, request, now):
        self._now.arrived(request, now)

    def admitted(self, request, now):
        self._now.admitted(request, now)

    def prefilled(self, request, now):
        self._now.prefilled(request, now)

    def held(self, request, now):
        self._now.held(request, now)

    def resumed(self, request, now):
        self._now.resumed(request, now)

    def evicted(self, request, now):
        self._now.evicted(request, now)

    def finished(self, request, now, how):
        self._now.finished(request, now, how)

    def stepped(self, steps):
        self._now.stepped(steps)

    def planned(self, plan, now, gauges):
        self._now.planned(plan, now, gauges)

    def plan(self, view):
        if view.now >= self._end:
            self._switch(view)
        plan = self._now.plan(view)
        if plan.until.time <= self._end:
            return plan
        return plan._replace(until=plan.until._replace(time=self._end))

    def _switch(self, view):
        number = int(view.now // self._block)
        while (number + 1) * self._block <= view.now:
            number += 1
        self._end = (number + 1) * self._block
        arm = self._order[number % len(self._order)]
        if arm != self._arm:
            self._arm, self._now = arm, self._make(arm)
            self._now.adopt(view)


class TimedBlocks(Listener):
    """Blocks begin by the clock; the first so many seconds are not part of the trial."""

    def __init__(self, book, order, arms, block, burn, skip, end):
        super().__init__(book)
        first = int(np.ceil(skip / (arms * block))) * arms
        for number in range(first, int(end // (arms * block)) * arms):
            start = number * block
            book.blocks.append(Block(order[number], number // arms, start, start + burn, start + block))
        self._due = list(book.blocks)

    def _ticked(self, now, left):
        self._backlogs(now)
        super()._ticked(now, left)

    def arrived(self, request, now):
        self._backlogs(now)
        super().arrived(request, now)

    def _backlogs(self, now):
        while self._due and now >= self._due[0].end:
            self._due.pop(0).backlog = self.book.waiting


def open_world(rate, seconds, seed):
    rng = np.random.default_rng([seed, 77])
    lengths = bundled("azure-conv")
    count = rng.poisson(rate * seconds)
    times = np.sort(rng.uniform(0, seconds, count))
    rows = rng.integers(0, len(lengths), count)
    prompts, outputs = np.array(lengths.prompt)[rows], np.array(lengths.output)[rows]
    return Workload.of(prompts, outputs, arrival=times, kinds=(Kind("chat", PROMISE),))


def closed_world(requests, seed, clients=640):
    law = headgate.length_law("uniform", 512)
    return headgate.generate(requests, seed=seed, prompt=law, output=law, clients=clients)


def book_of(world, arms, block, burn, seconds, seed, skip=0.0, judged=JUDGED):
    """Serve the workload under arms by turns; the books of it."""
    engine = headgate.card_engine("cal-h200-qwen3-8b", slots=256, budget=8192)
    rounds = int(seconds // (len(arms) * block)) + 2
    order = [arm for one in islice(in_rounds(len(arms), seed), rounds) for arm in one]
    policy = Switch(arms, block, order, Limits(engine.running, engine.batch_tokens, engine.cost, 1))
    book = Book({None: judged} if judged else None)
    listener = TimedBlocks(book, order, len(arms), block, burn, skip, seconds)
    headgate.simulate(engine, policy, world, observers=(listener,))
    return book


def findings_of(world, arms, block, burn, seconds, seed, skip=0.0, judged=JUDGED, primary=KEPT):
    book = book_of(world, arms, block, burn, seconds, seed, skip, judged)
    return judge(book, arms, primary, block, burn, Looks(), ended=True)
