"""Every name of vLLM that the plug-in relies on: there in this release, and missed in one clear line."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import wraps
from importlib import import_module
from types import SimpleNamespace

import pytest
from schedulers import EngineShape, request, scheduler
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.sched import output as messages
from vllm.v1.core.sched.request_queue import RequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

import headgate.vllm
from headgate.core.errors import InputError
from headgate.live.engine.settings import Settings
from headgate.live.vllm import factory, seams

MODULES = ("hooks", "plugin", "request_map", "knobs", "queues")
# What our code calls the things of vLLM.
OF_SCHEDULER = ("self", "scheduler", "self._scheduler")
OPTIONAL = {
    "skipped_waiting",
    "kv_holding_waiting",
    "max_num_active_reqs",
    "local_prefill_interval",
    "async_tokens_to_discard",
}  # asked for by getattr


def test_this_release_has_all_of_them():
    assert seams.faults() == []
    assert seams.RELEASES.problem(seams.version()) is None


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


def test_another_way_to_look_into_the_cache_is_named(monkeypatch):
    monkeypatch.setattr(KVCacheCoordinator, "find_longest_cache_hit", lambda self, request: None)
    _one_line("KVCacheCoordinator.find_longest_cache_hit does not take block_hashes")


def test_a_missing_way_to_promote_the_blocked_is_named(monkeypatch):
    for name in seams.PROMOTE:
        monkeypatch.delattr(Scheduler, name, raising=False)
    _one_line(seams.PROMOTE[0])


@pytest.mark.parametrize("name", seams.READ_BY_SCHEDULE)
def test_a_knob_that_schedule_no_longer_reads_is_named(monkeypatch, name):
    _source_lacks(monkeypatch, Scheduler.schedule, name)
    _one_line(name)


@pytest.mark.parametrize("name", seams.REQUEST)
def test_a_missing_field_of_a_request_is_named(monkeypatch, name):
    _source_lacks(monkeypatch, Request, name)
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


@pytest.mark.parametrize("name", seams.PASSED_ON)
def test_a_new_argument_that_ours_would_not_pass_on_is_named(monkeypatch, name):
    monkeypatch.setattr(Scheduler, name, _with_another_argument(getattr(Scheduler, name)))
    _one_line(f"Scheduler.{name} asks for hurry")


@pytest.mark.parametrize("name", seams.SET_AT_START)
def test_an_attribute_that_the_constructor_no_longer_sets_is_named(monkeypatch, name):
    _source_lacks(monkeypatch, Scheduler.__init__, name)
    _one_line(f"Scheduler no longer has {name}")


@pytest.mark.parametrize(
    ("kind", "member"), [(kind, member) for kind, members in seams.MEMBERS.items() for member in members]
)
def test_a_missing_member_is_named(monkeypatch, kind, member):
    module, name = kind
    whole = getattr(import_module(seams.MODULES[module]), name)
    less = SimpleNamespace(**{key: value for key, value in whole.__members__.items() if key != member})
    monkeypatch.setattr(import_module(seams.MODULES[module]), name, less)
    _one_line(f"{name} lacks {member}")


# -- what the factory does about it -----------------------------------------------------------------


def no_preemption(patch):
    patch.delattr(Scheduler, "_preempt_request")


def another_duty_of_a_stop(patch):
    patch.setattr(
        Scheduler, "_handle_stopped_request", _with_another_argument(Scheduler._handle_stopped_request)
    )


def another_argument_of_schedule(patch):
    patch.setattr(Scheduler, "schedule", _with_another_argument(Scheduler.schedule))


def holds_are_not_read(patch):
    _source_lacks(patch, Scheduler.schedule, "next_decode_eligible_step")


def the_budget_is_not_read(patch):
    _source_lacks(patch, Scheduler.schedule, "max_num_scheduled_tokens")


def the_slots_are_elsewhere(patch):
    _source_lacks(patch, Scheduler.__init__, "max_num_running_reqs")


def queues_with_another_duty(patch):
    patch.setattr(RequestQueue, "__abstractmethods__", RequestQueue.__abstractmethods__ | {"reverse"})


def requests_that_do_not_say_that_they_prefill(patch):
    _source_lacks(patch, Request, "is_prefill_chunk")


def steps_that_do_not_say_what_they_hold(patch):
    fields = dict(messages.SchedulerOutput.__annotations__)
    del fields["num_scheduled_tokens"]
    patch.setattr(messages.SchedulerOutput, "__annotations__", fields)


def another_look_into_the_cache(patch):
    patch.setattr(KVCacheCoordinator, "find_longest_cache_hit", lambda self, request: None)


BROKEN = {
    no_preemption: "Scheduler lacks _preempt_request",
    another_duty_of_a_stop: "Scheduler._handle_stopped_request asks for hurry",
    another_argument_of_schedule: "Scheduler.schedule asks for hurry",
    holds_are_not_read: "Scheduler.schedule no longer reads next_decode_eligible_step",
    the_budget_is_not_read: "Scheduler.schedule no longer reads max_num_scheduled_tokens",
    the_slots_are_elsewhere: "Scheduler no longer has max_num_running_reqs",
    queues_with_another_duty: "RequestQueue asks for reverse, which our queue lacks",
    requests_that_do_not_say_that_they_prefill: "Request lacks is_prefill_chunk",
    steps_that_do_not_say_what_they_hold: "SchedulerOutput lacks num_scheduled_tokens",
    another_look_into_the_cache: "KVCacheCoordinator.find_longest_cache_hit does not take block_hashes",
}


@pytest.mark.parametrize("newer", [False, True], ids=["tested", "newer"])
@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__)
def test_a_broken_seam_is_refused_with_its_name_and_the_remedy(monkeypatch, breaks, newer):
    monkeypatch.setattr(factory, "faults", seams.faults)  # elsewhere remembered
    if newer:
        monkeypatch.setattr(factory, "version", lambda: "0.99.0")
    release = "0.99.0" if newer else seams.version()
    breaks(monkeypatch)
    with pytest.raises(InputError) as refused:
        _refuse(force=False)
    line = str(refused.value)
    assert line.startswith(f"vLLM {release} has changed what headgate relies on: {BROKEN[breaks]}")
    assert line.endswith("; use vLLM 0.26 to 0.33 or a newer headgate, or pass --force (force: true) to try")
    assert "\n" not in line
    _refuse(force=True)


def test_a_newer_release_runs_with_one_warning(monkeypatch, caplog):
    monkeypatch.setattr(factory, "version", lambda: "0.99.0")
    made = scheduler(EngineShape(), {"policy": "mixed"})
    made.add_request(request("r", [1, 2, 3], 4))
    assert made.schedule().num_scheduled_tokens == {"r": 3} and made._headgate.fallen is None
    (line,) = [each.getMessage() for each in caplog.records if "0.99.0" in each.getMessage()]
    assert line.startswith("headgate: vLLM 0.99.0 was not tested with this headgate (0.26 to 0.33 were)")


def test_an_older_release_is_refused_unless_forced(monkeypatch):
    monkeypatch.setattr(factory, "version", lambda: "0.25.9")
    with pytest.raises(InputError, match=r"^vLLM 0\.25\.9 is older than those headgate knows \(0\.26 to"):
        scheduler(EngineShape(), {"policy": "mixed"})
    assert scheduler(EngineShape(), {"policy": "mixed", "force": True})._headgate.policy is not None


def test_a_module_that_cannot_be_imported_is_named(monkeypatch):
    """Even where our own modules cannot be imported then."""
    monkeypatch.setitem(sys.modules, "headgate.live.vllm.factory", None)
    monkeypatch.setitem(sys.modules, "vllm.v1.core.sched.interface", None)
    with pytest.raises(InputError, match=r"relies on: cannot import vllm\.v1\.core\.sched\.interface"):
        headgate.vllm.scheduler()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "headgate.live.vllm.factory", None)
    with pytest.raises(ImportError):  # vLLM is not to blame
        headgate.vllm.scheduler()


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


def _refuse(force: bool) -> None:
    """What the factory does before it makes a scheduler."""
    model = SimpleNamespace(model="m", runner_type="generate")
    factory._refuse(Settings(force=force), SimpleNamespace(model_config=model))


def _source_lacks(patch: pytest.MonkeyPatch, thing: object, name: str) -> None:
    """As if it had another name in the source of that class or function."""
    read = inspect.getsource
    renamed = re.sub(rf"\.{name}\b", ".something_else", read(thing))
    patch.setattr(inspect, "getsource", lambda it: renamed if it is thing else read(it))


def _with_another_argument(method):
    """The same, and it asks for one thing more."""
    signature = inspect.signature(method)
    more = inspect.Parameter("hurry", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=False)

    @wraps(method)
    def longer(*args, **words):
        return method(*args, **words)

    longer.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])
    return longer


def _one_line(name: str) -> None:
    """The factory refuses with one line that names it."""
    named = [fault for fault in seams.faults() if name in fault]
    assert named, seams.faults()
    assert all("\n" not in fault and len(fault) < 120 for fault in named)
