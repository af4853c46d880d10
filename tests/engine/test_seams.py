"""Every name of vLLM that the plug-in relies on: there in this release, and missed in one clear line."""

from __future__ import annotations

import ast
import inspect
from functools import wraps
from importlib import import_module

import pytest
from schedulers import EngineShape, request, scheduler
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.sched import output as messages
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from headgate.core.errors import InputError
from headgate.live.vllm import factory, seams

MODULES = ("hooks", "plugin", "request_map", "knobs", "queues")
# What our code calls the things of vLLM.
OF_SCHEDULER = ("self", "scheduler", "self._scheduler")
OPTIONAL = {"skipped_waiting", "kv_holding_waiting", "max_num_active_reqs"}  # asked for by getattr


def test_this_release_has_all_of_them():
    assert seams.faults() == []
    assert seams.unsupported(seams.version()) is None


@pytest.mark.parametrize("name", seams.METHODS)
def test_a_missing_method_is_named(monkeypatch, name):
    for kind in Scheduler.__mro__:
        if name in vars(kind):
            monkeypatch.delattr(kind, name)
    _one_line(f"Scheduler lacks {name}")


@pytest.mark.parametrize("name", [name for name, wanted in seams.METHODS.items() if wanted])
def test_a_renamed_argument_is_named(monkeypatch, name):
    monkeypatch.setattr(Scheduler, name, lambda self, other: None)
    _one_line(f"{name} lacks the argument {seams.METHODS[name][0]}")


def test_a_new_argument_of_schedule_is_named(monkeypatch):
    schedule = Scheduler.schedule

    @wraps(schedule)
    def longer(self, throttle_prefills=False, hurry=False):
        return schedule(self, throttle_prefills)

    longer.__signature__ = inspect.signature(longer, follow_wrapped=False)
    monkeypatch.setattr(Scheduler, "schedule", longer)
    _one_line("Scheduler.schedule asks for hurry")


def test_another_way_to_look_into_the_cache_is_named(monkeypatch):
    monkeypatch.setattr(KVCacheCoordinator, "find_longest_cache_hit", lambda self, request: None)
    _one_line("KVCacheCoordinator.find_longest_cache_hit does not take block_hashes")


def test_a_missing_way_to_promote_the_blocked_is_named(monkeypatch):
    for name in seams.PROMOTE:
        monkeypatch.delattr(Scheduler, name, raising=False)
    _one_line(seams.PROMOTE[0])


@pytest.mark.parametrize("name", seams.READ_BY_SCHEDULE)
def test_a_knob_that_schedule_no_longer_reads_is_named(monkeypatch, name):
    read = inspect.getsource
    renamed = read(Scheduler.schedule).replace(name, "something_else")
    monkeypatch.setattr(inspect, "getsource", lambda it: renamed if it is Scheduler.schedule else read(it))
    _one_line(name)


@pytest.mark.parametrize("name", seams.REQUEST)
def test_a_missing_field_of_a_request_is_named(monkeypatch, name):
    read = inspect.getsource
    renamed = read(Request).replace(name, "something_else")
    monkeypatch.setattr(inspect, "getsource", lambda it: renamed if it is Request else read(it))
    _one_line(name)


def test_a_new_duty_of_queues_is_named(monkeypatch):
    monkeypatch.setattr(
        RequestQueue, "__abstractmethods__", RequestQueue.__abstractmethods__ | {"reverse_requests"}
    )
    _one_line("reverse_requests")


@pytest.mark.parametrize(("kind", "name"), [(k, name) for k, names in seams.OUTPUT.items() for name in names])
def test_a_missing_field_of_a_message_is_named(monkeypatch, kind, name):
    fields = {key: value for key, value in getattr(messages, kind).__annotations__.items() if key != name}
    monkeypatch.setattr(getattr(messages, kind), "__annotations__", fields)
    _one_line(name)


@pytest.mark.parametrize("found", [(0, 25, 9), (0, 33, 0), (1, 0, 0)])
def test_other_releases_are_refused_unless_forced(monkeypatch, found):
    monkeypatch.setattr(factory, "version", lambda: found)
    with pytest.raises(InputError, match=r"^vLLM \d+\.\d+\.\d+ is not one headgate knows \(0\.26 to 0\.32\)"):
        scheduler(EngineShape(), {"policy": "mixed"})
    forced = scheduler(EngineShape(), {"policy": "mixed", "force": True})
    assert forced._headgate.policy is not None


@pytest.mark.parametrize("ahead", [False, True])
def test_every_attribute_we_touch_is_there(ahead):
    """Read from our own source, so that a new use is not forgotten here."""
    made, asked = scheduler(EngineShape(ahead=ahead)), request("r", [1, 2, 3], 4)
    made.add_request(asked)
    answer = made.schedule()
    for holders, thing in (
        (OF_SCHEDULER, made),
        (("request",), asked),
        (("output", "scheduler_output"), answer),
        (("output.scheduled_cached_reqs",), answer.scheduled_cached_reqs),
    ):
        touched = {name for module in MODULES for name in _attributes(module, holders)}
        assert touched, holders
        assert {name for name in touched - OPTIONAL if not hasattr(thing, name)} == set()


def _attributes(module: str, holders: tuple[str, ...]) -> set[str]:
    """Names our module takes from these things; our own in the mixin begin with _headgate."""
    source = inspect.getsource(import_module(f"headgate.live.vllm.{module}"))
    mixin = module == "plugin"
    wanted = {holder for holder in holders if mixin or holder != "self"}
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in wanted:
            found.add(node.attr)
    return {name for name in found if not name.startswith("_headgate")}


def _one_line(name: str) -> None:
    """The factory refuses with one line that names it."""
    named = [fault for fault in seams.faults() if name in fault]
    assert named, seams.faults()
    assert all("\n" not in fault and len(fault) < 120 for fault in named)
