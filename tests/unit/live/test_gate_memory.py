"""Memory of a router: what a gate keeps of requests that have ended, and how a loop allocates its reads."""

import gc
import subprocess
import sys
import tracemalloc
from math import inf

import pytest

from fleet_worlds import draws, make_router
from headgate.core.fleet import Stage
from headgate.core.policy import End
from headgate.live.route.gate.gate import ClassLimits, EngineState, Gate, TicketState
from headgate.methods.fluid.flows import EnginePace, Flow, Instance, TokenPrices
from headgate.methods.fluid.planner import plan_fluid
from still_loop import Still, placed

FLOWS = (Flow("code", 30.0, 20.0, 0.5), Flow("chat", 60.0, 40.0, 2.0))
PLAN = plan_fluid(Instance(FLOWS, EnginePace(4, 64, 0.02, 1e-4, 40.0), TokenPrices(0.1, 0.2)))
A_DAY = 86_400.0
WARM, MORE = 100, 200
ROUTERS = ("least-loaded", "split", "llm-d", "prefix-aware", "gate-and-route+", "density-deep")
LEAST = 40  # bytes a request: less than any record of one


def serve(gate: Gate, loop: Still, requests: int) -> None:
    """One after the other, 20 a second; every other one waits in its queue, and some hang up there."""
    for number in range(requests):
        loop.go(loop.now + 0.05)
        tickets = [gate.arrive(flow.name, 40, 50) for flow in FLOWS for _ in range(2)]
        for turn in range(3):
            for ticket in tickets:
                move = placed(gate, ticket) if ticket.state is not TicketState.GONE else None
                if move is not None and move.stage is Stage.PREFILL:
                    gate.parted(ticket, A_DAY)
                elif move is not None or (turn and not number % 3):
                    gate.end(ticket, End.STOPPED if move else End.ABORTED, 20)
            loop.turn()
        for ticket in tickets:
            gate.end(ticket, End.ABORTED)
        loop.turn()


@pytest.mark.parametrize("name", ROUTERS)
def test_a_gate_keeps_nothing_of_requests_that_have_ended(name):
    """Also with queues and leases of a day, whose deadlines are all to come."""
    loop, more = Still(), {"prefill": 1} if name == "split" else {}
    options = {"limits": {flow.name: ClassLimits(8, A_DAY) for flow in FLOWS}, "watchdog": inf}
    states = [EngineState(2) for _ in range(2)]
    router = make_router(name, PLAN, 2, draws(0), **more)
    gate = Gate(router, [flow.name for flow in FLOWS], states, clock=loop.time, loop=loop, **options)
    tracemalloc.start()
    try:
        serve(gate, loop, WARM)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        serve(gate, loop, MORE)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert gate.fallen is None and gate.check() == [] and not gate.tickets
    assert after - before < LEAST * len(FLOWS) * 2 * MORE


READS = """
import ctypes, socket, sys
sys.modules["uvloop"] = None
from headgate.live.route.run import loop_factory
assert loop_factory() is None
one, other = socket.socketpair()
class Info(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]
mapped = ctypes.CDLL(None).mallinfo2
mapped.restype = Info
def read():
    one.send(bytes(16384))
    return other.recv(256 * 1024)  # as the standard loop does
read()  # what is mapped and given back makes glibc map no more of its size, unless it is told otherwise
before = mapped().hblks
kept = [read() for _ in range(64)]
print(mapped().hblks - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_reads_of_the_standard_loop_are_not_cut_from_the_heap():
    done = subprocess.run([sys.executable, "-c", READS], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 32  # the first few fit into what the heap has free
