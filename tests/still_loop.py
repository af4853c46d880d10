"""A clock and an event loop that stand still unless a test moves them, and a handler that never waits."""

from __future__ import annotations


class Timer:
    """One callback and its time."""

    def __init__(self, when, callback, timers):
        self.when, self.callback, self._timers = when, callback, timers

    def cancel(self):
        if self in self._timers:
            self._timers.remove(self)


class Still:
    """As much of an event loop as a gate needs."""

    def __init__(self):
        self.now, self.soon, self.timers = 0.0, [], []

    def time(self):
        return self.now

    def call_soon(self, callback):
        self.soon.append(callback)

    def call_later(self, delay, callback):
        timer = Timer(self.now + delay, callback, self.timers)
        self.timers.append(timer)
        return timer

    def turn(self):
        """One turn of the loop."""
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()

    def go(self, until):
        """Timers go off in order, and whatever they set."""
        self.turn()
        while due := [each for each in self.timers if each.when <= until]:
            first = min(due, key=lambda each: each.when)
            self.timers.remove(first)
            self.now = first.when
            first.callback()
            self.turn()
        self.now = until


def placed(gate, ticket):
    """What `place` returns or raises without waiting; None: it would wait."""
    waiting = gate.place(ticket)
    if ticket.answer is None and not ticket.lapsed:
        waiting.close()
        return None
    try:
        waiting.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("it waits although there is an answer")
