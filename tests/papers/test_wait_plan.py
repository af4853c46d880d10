"""`plan wait`: from words to thresholds, and what it says when they cannot be had."""

from __future__ import annotations

import json
import re

import pytest
from typer.testing import CliRunner

from headgate.cli import app, main
from headgate.core.errors import InputError
from headgate.experiment.settings import experiment
from headgate.settings_base import checked
from headgate_papers.wait.balance import kv_work
from headgate_papers.wait.command import wait
from headgate_papers.wait.plan import WaitSettings, plan_wait

CARD = {"card": "pub-a100-llama-7b", "block": 1, "slots": 4096}
FOUR = CARD | {
    "rate": 240.0,
    "requests": 30_000,
    "classes": [
        {"name": f"c{length}", "share": length, "workload": "fixed", "prompt": 10, "output": length + 1}
        for length in (20, 40, 80, 160)
    ],
}


def plan(words, **wishes):
    return plan_wait(experiment(words), checked(WaitSettings, wishes))


def test_types_are_the_classes_of_a_mix():
    found = plan(FOUR, slack=0.0)
    assert found.mix.names == ("c20", "c40", "c80", "c160")
    assert [part.work for part in found.mix.parts] == [kv_work(10, length) for length in (20, 40, 80, 160)]
    assert found.fluid.kv == pytest.approx(49_090, rel=0.02)
    assert found.fluid.seconds == pytest.approx(22.7e-3, rel=0.02)
    assert found.mix.rate / found.most == pytest.approx(0.8208, rel=0.01)
    assert found.pace.shortest < found.thresholds.seconds <= found.pace.longest
    assert found.need <= 100_000


def test_segments_as_told():
    found = plan(FOUR, slack=0.0, segments=4)
    assert len(found.nested.segments.ends) == 4 and found.nested.segments.ends[-1] == 160
    assert found.nested.bound.total == float("inf") and found.nested.overflow == 1.0
    slack = plan(FOUR | {"rate": 200.0}, slack=0.02, segments=4, miss=0.1, horizon=200.0)
    assert slack.nested.bound.total < 300_000
    too_much = plan(FOUR, slack=2.0, segments=4)
    assert too_much.nested is None and "with 2 slack each" in too_much.why_not_nested
    assert set(too_much.policies()) == {"wait"} and too_much.as_dict()["nested"] is None


def test_types_by_output_length():
    words = CARD | {"workload": "uniform", "prompt": 60, "output": 200, "rate": 20.0, "requests": 5000}
    found = plan(words, types=3)
    assert found.mix.names[-1] == "more" and len(found.mix.names) == 3
    assert found.mix.split == f"output:{found.mix.names[0]}/{found.mix.names[1]}"
    one = plan(words)
    assert sum(part.rate for part in found.mix.parts) == pytest.approx(one.mix.rate)
    works = [sum(part.rate * part.work for part in each.mix.parts) for each in (found, one)]
    assert works[0] == pytest.approx(works[1])
    assert found.policies()["wait"]["split"] == found.mix.split


def test_a_load_instead_of_a_rate():
    words = CARD | {"workload": "fixed", "prompt": 60, "output": 201, "requests": 2000}
    found = plan(words, load=0.5)
    assert found.mix.rate == pytest.approx(found.most / 2)
    assert found.most * kv_work(60, 200) == pytest.approx(2_631_578.95)


def test_promised_tpot_caps_the_pace():
    words = CARD | {"workload": "fixed", "prompt": 60, "output": 201, "rate": 20.0, "requests": 2000}
    free = plan(words)
    capped = plan(words | {"tpot": 0.0101})
    pace = [each.thresholds.sizes[0] / each.mix.parts[0].rate for each in (free, capped)]
    assert pace[1] <= 0.0101 < pace[0]
    with pytest.raises(InputError, match=r"--tpot 0.001s: need t >= DT\*.*promise 0.009913s or more"):
        plan(words | {"tpot": 0.001})


@pytest.mark.parametrize(
    ("change", "wishes", "said"),
    [
        ({"rate": 500.0}, {}, r"unstable: .*need d1\*W < 1"),
        ({"rate": 300.0}, {}, r"M\* = .*need M\* <= C = 100,000; serve at most 29\d"),
        ({"kv_tokens": 9000}, {}, r"need M\* <= C = 9,000"),
        (
            {"kv_tokens": 49_000},
            {},
            r"one request more of each type, 340, need <= C = 49,000; serve at most 23",
        ),
        (
            {"kv_tokens": 250},
            {},
            r"sum of l_j \+ l'_j < C: one request of each type needs 340",
        ),
        ({"slots": 64}, {}, r"N\* = 6\d\d.* need N\* <= slots = 64; serve at most 5\d.*--slots 6\d\d"),
        ({}, {"miss": 0.0}, "miss: 0.0 is not allowed; give a number above 0"),
        ({}, {"slack": float("inf")}, "slack: inf is not allowed; give a finite number"),
        ({}, {"slack": float("nan")}, "slack: nan is not allowed; give a finite number"),
        ({}, {"segments": 999}, "999 segments of outputs up to 160 iterations; choose 1 to 160"),
        ({}, {"load": 0.5}, "drop one of the two"),
    ],
)
def test_what_cannot_be_had_is_named(change, wishes, said):
    with pytest.raises(InputError, match=said) as caught:
        plan(FOUR | change, **wishes)
    assert "\n" not in str(caught.value)


def run(*words: str) -> str:
    found = CliRunner().invoke(app, ["plan", "wait", *words], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return found.stdout


def examples() -> list[list[str]]:
    lines = re.sub(r"\n {8,}", " ", wait.__doc__).splitlines()
    return [line.split()[3:] for line in lines if line.strip().startswith("headgate plan wait")]


@pytest.mark.parametrize("words", examples(), ids=lambda words: " ".join(words)[:40])
def test_examples_of_the_help_work_and_fit(words):
    out = run(*words)
    assert max(len(line) for line in out.splitlines()) <= 80
    assert "…" not in out
    lines = out.replace("\\\n", "").splitlines()  # as a shell reads them
    (copied,) = (line for line in lines if line.startswith("  --policy nested-wait"))
    _, ends, thresholds = copied.split("--set ")
    assert thresholds.startswith("thresholds=") and thresholds.count("/") == ends.count("/")
    text = " ".join(out.split())
    for part in (
        "DT*",
        "M*",
        "decode tokens/s, all that arrives",
        "Nested WAIT",
        "--policy wait",
        "--set ends=",
    ):
        assert part in text


def test_text_of_thresholds_without_slack():
    card = ("--card", "pub-a100-llama-7b")
    laws = ("--prompt-law", "fixed", "--output-law", "geometric", "--prompt", "10", "--output", "30")
    none = run(*card, *laws, "--rate", "100", "--slack", "0", "--segments", "3")
    assert "No memory is enough" in none and "give --slack above 0" in " ".join(none.split())
    heavy = run(*card, *laws, "--rate", "500", "--slack", "3", "--segments", "6", "--slots", "4096")
    assert "None: " in heavy and "with 3 slack each" in " ".join(heavy.split())


def test_json_and_exit_code(monkeypatch, capsys):
    found = json.loads(
        run("--card", "pub-a100-llama-7b", "--rate", "20", "--prompt", "60", "--output", "100", "--json", "-")
    )
    assert found["load"] < 1 and found["wait"]["types"][0]["threshold"] > 0
    assert found["nested"]["bound"]["total"] >= found["nested"]["bound"]["full"]
    assert set(found["policies"]) == {"wait", "nested-wait"}
    monkeypatch.setattr("sys.argv", ["headgate", "plan", "wait", "--clients", "5"])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert "thresholds of WAIT are for a rate" in error and error.count("\n") == 1


@pytest.mark.parametrize("change", [{"kv_tokens": 100}, {"kv_tokens": 300}, {"kv_tokens": 900}])
@pytest.mark.parametrize("load", [{"rate": 40.0}, {"rate": 2.0}])
def test_memory_that_cuts_requests_is_advised_for_whole_ones(change, load):
    """Requests that memory would cut short need less of it; what they need is not enough once it is there."""
    words = CARD | {"prompt": 60, "output": 200, "requests": 2000} | load
    with pytest.raises(InputError, match=r"give --kv-tokens (\d+)") as caught:
        plan(words | change)
    enough = int(str(caught.value).split("--kv-tokens ")[1].split()[0])
    assert plan(words | {"kv_tokens": enough}).need <= enough
    with pytest.raises(InputError):
        plan(words | {"kv_tokens": int(0.9 * enough)})


def test_the_first_lines_say_that_the_prefix_cache_is_not_counted():
    shared = {"rate": 5.0, "requests": 400, "shared_prefix": "1024:4", "prompt": 100, "output": 50}
    found = plan(shared)
    assert 0.8 < found.cached < 1 and found.as_dict()["ignored_prefix_hits"] == found.cached
    assert plan(shared | {"prefix_cache": False}).alarm == "" == plan(shared | {"shared_prefix": None}).alarm
    words = ["plan", "wait", "--rate", "5", "--requests", "400", "--shared-prefix", "1024:4"]
    said = CliRunner().invoke(app, [*words, "--prompt", "100", "--output", "50"]).output
    assert f"would find {100 * found.cached:.0f} %" in said
    assert said.index("The prefix cache is not counted") < said.index("Card cal-h200-qwen3-8b")
