"""`headgate advise`: the answer first, honest baselines beside it, lines that can be pasted."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from headgate.advisor.advice import Advice, Advised, _left_out
from headgate.advisor.capacity.plan import CARRIES, WIDE, PolicyRate, apart, declined, half_width
from headgate.advisor.capacity.trials import Case, Contender
from headgate.advisor.fewest_engines import FleetFound, Size
from headgate.cost.card import load_card
from headgate.experiment.settings import experiment
from headgate.report.plans.advise import answer
from headgate.settings_base import BETWEEN
from headgate.stats.figures import Estimate, Spread

SMALL = ["--prompt", 600, "--output", 10, "--seeds", 2, "--jobs", 1, "--requests", 300, "--precision", 0.1]
PROMISE = ["--slo", "ttft=400ms@p95,tbt=60ms@p99"]
QUICK = ["advise", *SMALL, *PROMISE, "--policy", "keep", "--slots", 64]


def flat(text: str) -> str:
    return " ".join(text.split())


def test_answer_first_then_plain_vllm_then_lines_to_paste(headgate, tmp_path):
    run = headgate(*QUICK, "--rate", 10, "--cache", "kept", "--report", "advice.html")
    assert run.code == 0, run.err
    said = flat(run.out)
    title, answer = run.out.split("\n\n")[:2]
    assert title == "Advice: card cal-h200-qwen3-8b, uniform lengths"
    enough = "Plain vLLM at its defaults is enough for your load of 10.00 requests/s: 1 engine. For more: "
    assert flat(answer).startswith(enough) and "--max-num-seqs 64 --max-num-batched-tokens" in flat(answer)
    for part in (
        "asynchronous engine",
        "Plain vLLM at its own best flags",
        "defaults: the same without a flag",
        "gives way first",
        "The rest TTFT p99",
        "; TBT worst",
    ):
        assert part in said
    page = (tmp_path / "advice.html").read_text()
    assert f"<strong>{flat(answer).split('. For')[0]}" in flat(page)


def test_no_line_to_paste_where_no_policy_keeps_the_promise(headgate):
    impossible = ["--slo", "ttft=1ms@p95", "--policy", "keep", "--slots", 64]
    run = headgate("advise", *SMALL, *impossible, "--rate", 10, "--cache", "kept")
    assert run.code == 2 and not run.out
    assert run.err.startswith(
        "headgate: one engine that is almost idle cannot keep p95 TTFT <= 1 ms; the nearest promise "
    )
    (wish,) = re.findall(r"holds is --slo (\S+): ask for that", run.err)
    rate = ["plan", "capacity", *SMALL, "--policy", "mixed", "--slots", 64, "--cache", "none"]
    assert headgate(*rate, "--slo", wish).code != 2


def test_a_load_that_no_policy_bears_is_refused_at_once(refused):
    words = ["--rate", 2000, "--engines-at-most", 2]
    refused([*QUICK, *words, "--cache", "none"], "engines, more than --engines-at-most 2; raise it, or ask")


def test_sessions_are_counted_behind_a_router_that_knows_prefixes_too(headgate, tmp_path):
    """Each turn repeats 6,000 tokens or more, which only the engine of its session has."""
    turns = sorted((3 * turn + 0.27 * user, turn, user) for turn in range(8) for user in range(11))
    rows = "".join(f"{at:.2f},{6000 + 200 * turn},20,u{user}\n" for at, turn, user in turns)
    (tmp_path / "chat.csv").write_text("arrival,prompt,output,session\n" + rows)
    words = ["--trace", "chat.csv", "--scale-rate", 8, "--as-recorded", "--policy", "mixed", "--slots", 32]
    words += ["--budget", 8192, "--slo", "ttft=400ms@p85", "--jobs", 1, "--cache", "none"]
    run = headgate("advise", *words, "--json", "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    best = next(each for each in found["final"] if each["found"]["policy"] == found["best"])
    assert best["routers"]["prefix-aware"] == best["engines"] < best["routers"]["least-loaded"]
    assert f"{best['engines']} engines behind router prefix-aware" in flat(run.out)


def test_lines_it_prints_are_taken(headgate):
    run = headgate(*QUICK, "--rate", 10, "--cache", "kept")
    ours, plain = pasted(run.out, "headgate serve"), pasted(run.out, "vllm serve")
    assert "--card cal-h200-qwen3-8b --ttft 400ms --tbt 60ms" in ours
    plain_first = run.out.index("Plain vLLM at its best flags\nvllm") < run.out.index("headgate serve Q")
    assert "run plain vLLM" in flat(run.out) and plain_first and "--policy vllm --card" in ours
    assert headgate(*shlex.split(ours)[1:], "--dry-run").code == 0
    assert shlex.split(plain)[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"]
    flags = shlex.split(plain)[3:]
    limits = ["--max-num-seqs", "--max-num-batched-tokens", "--max-cudagraph-capture-size"]
    limits.append("--gpu-memory-utilization")  # which graphs larger than vLLM's own need
    assert flags[::2] == ["--max-model-len", *limits] and flags[1] == "17408"
    assert flags[7] == flags[5] and flags[9] == "0.90"  # graphs reach as far as steps
    assert "--gpu-memory-utilization 0.90" in ours


DERIVED = {
    "derived:qwen3-32b@h100:tp2:fp8:kv-fp8": (
        "Qwen/Qwen3-32B --tensor-parallel-size 2 --quantization fp8 --kv-cache-dtype fp8 "
        "--max-model-len 40960 "
    ),
    "derived:qwen3-30b-a3b@h100:tp2:ep2:util0.8": (
        "Qwen/Qwen3-30B-A3B --tensor-parallel-size 2 --enable-expert-parallel --gpu-memory-utilization 0.8 "
        "--max-model-len 40960 "
    ),
    "derived:meta-llama/Llama-3.1-8B@h100": "meta-llama/Llama-3.1-8B --max-model-len 131072 ",
    "pub-a100-llama-7b": "MODEL --max-model-len 4096 ",
}


def pasted(text: str, program: str) -> str:
    """The line to paste that begins with it, on one line; of plain vLLM the one with its best flags."""
    text = text.partition("at its best flags\n")[2] if "at its best flags\n" in text else text
    lines = text.replace("\\\n", " ").splitlines()
    return flat(next(line for line in lines if line.startswith(program)))


@pytest.mark.parametrize(("card", "begins"), DERIVED.items(), ids=DERIVED)
def test_lines_to_paste_are_the_engine_that_was_simulated(headgate, card, begins):
    tiny = ["--card", card, "--prompt", 600, "--output", 40, "--requests", 30]
    words = [*tiny, "--seeds", 1, "--jobs", 1, *PROMISE, "--rate", 1, "--policy", "keep", "--slots", 64]
    advice = headgate("advise", *words, "--cache", "none").out
    model, _, flags = begins.partition(" ")
    assert pasted(advice, "vllm serve").startswith(f"vllm serve {begins}--max-num-seqs ")
    ours = pasted(advice, "headgate serve")
    assert ours.startswith(f"headgate serve {model} ") and f" {flags}--max-num-seqs " in ours
    formulas = headgate("plan", "flags", *tiny).out
    assert pasted(formulas, "vllm serve").startswith(f"vllm serve {begins}--max-num-seqs ")
    for said in (advice, formulas):
        assert ("MODEL stands for Llama-7B" in flat(said)) is (model == "MODEL")


def test_a_second_question_is_answered_from_what_is_known(headgate, monkeypatch):
    first = json.loads(headgate(*QUICK, "--cache", "kept", "--json", "-").out)
    monkeypatch.setattr(Case, "run", lambda self, task: pytest.fail("simulated again"))
    again = json.loads(headgate(*QUICK, "--cache", "kept", "--json", "-").out)
    assert again["final"] == first["final"]
    with pytest.raises(pytest.fail.Exception, match="simulated again"):  # another question is another file
        headgate(*QUICK, "--cache", "kept", "--seed", 7)


def test_plain_vllm_is_tried_at_several_flags_and_at_its_defaults(headgate):
    found = json.loads(
        headgate(
            *("advise", *SMALL, *PROMISE, "--policy", "keep", "--rate", 9, "--cache", "none", "--json", "-")
        ).out
    )
    tried = {each["policy"] for each in found["first_round"]}
    assert "mixed, 1024 slots, 8192 tokens" in tried
    assert len([name for name in tried if name.startswith("mixed")]) >= 5
    final = {each["found"]["policy"]: each["found"]["rate"]["value"] for each in found["final"]}
    assert found["default"] == "mixed, 1024 slots, 8192 tokens" and found["default"] in final
    plain = [rate for name, rate in final.items() if name.startswith("mixed,")]
    assert final[found["plain"]] == max(plain)
    assert final[found["best"]] >= final[found["plain"]]


def engines_of(headgate, flags: list[object], policy: str) -> int:
    words = ["plan", "capacity", "--find", "engines", "--policy", policy, "--cache", "none", "--json", "-"]
    return json.loads(headgate(*words, *flags).out)["fleets"][0]["engines"]


def test_advise_and_find_engines_count_alike(headgate):
    """Near what one engine bears, where runs of other lengths, seeds or kinds would answer otherwise."""
    traffic = ["--prompt", 600, "--output", 40, *PROMISE, "--seeds", 4, "--jobs", 1, "--requests", 300]
    traffic += ["--rate", 40, "--budget", 8192]
    words = ["advise", *traffic, "--policy", "mixed", "--slots", 64, "--cache", "none", "--json", "-"]
    (one,) = (each for each in json.loads(headgate(*words).out)["final"] if each["counted"])
    assert one["engines"] == 1 and min(one["found"]["by_seed"]) > 40
    assert engines_of(headgate, [*traffic, "--slots", one["slots"]], one["policy"]) == 1


def test_advise_and_plan_flags_take_as_many_slots_as_memory_holds(headgate, refused):
    """Long requests, so that memory and not the card bounds the slots."""
    traffic = ["--prompt", 6000, "--output", 300, "--slo", "ttft=4s@p95,tbt=150ms@p99", "--requests", 60]
    traffic += ["--seeds", 2, "--jobs", 1, "--json", "-"]
    advice = json.loads(headgate("advise", *traffic, "--policy", "mixed", "--cache", "none").out)
    refused(["plan", "flags", *traffic[:6]], "headgate advise --policy mixed searches vLLM's")
    most = json.loads(headgate("plan", "flags", *traffic[:4], "--json", "-").out)["flags"]["--max-num-seqs"]
    slots = {each["slots"] for each in advice["final"] if each["found"]["policy"] != advice["default"]}
    assert most["value"] < 256 and slots == {most["value"]}


def found_rates(name: str, *by_seed: float) -> PolicyRate:
    rate = Spread.of_values(np.array(by_seed)).estimate()
    return PolicyRate(name, rate, 0.5, by_seed, "p95", {}, 1)


def test_one_criterion_tells_rates_apart():
    """Paired by seed: what overlaps may still differ, and what is far apart on average may not."""
    assert apart(found_rates("a", 10, 14, 18, 22), found_rates("b", 9, 13, 17.1, 21))
    assert not apart(found_rates("a", 10, 14, 18, 22), found_rates("b", 6, 14.1, 13, 22.3))
    assert apart(found_rates("a", 10), found_rates("b", 8)) and not apart(
        found_rates("a", 10), found_rates("b", 9.5)
    )


DERIVED_8 = "derived:qwen3-8b@h100"
START = SimpleNamespace(
    card=load_card("cal-h200-qwen3-8b"), settings=experiment({}), engine=SimpleNamespace(width=1)
)


def test_what_is_said_of_the_engines_is_of_those_to_run():
    """The defaults come first where they are enough: their router, and how near they are to their bound."""

    def counted(name: str, slots: int, rate: float, router: str, load: float) -> Advised:
        nothing = Estimate(0.0)
        size = Size(2, 1, 0, 1, {}, {}, nothing, nothing, load, {})
        fleet = FleetFound(name, router, "mixed", 2, "", (size,))
        found = found_rates(f"mixed, {slots} slots, 8192 tokens", rate)
        return Advised("mixed", {}, slots, 8192, found, engines=2, counted=True, fleet=fleet)

    default = counted("one", 1024, 5.0, "least-loaded", 0.97)
    best = counted("two", 64, 7.0, "prefix-aware", 0.8)
    said = answer(Advice(START, (), None, 9.0, 32, (), (best, default), (), 300))
    assert "2 engines, at 97 % of λ* with these flags: 3 are safer. For more: run plain vLLM" in said
    assert "prefix-aware" not in said


def test_what_is_not_significantly_better_is_no_reason_for_a_plug_in():
    default = Advised("mixed", {}, 1024, 8192, found_rates("mixed, 1024 slots, 8192 tokens", 3.0, 3.1, 3.2))
    plain = Advised("mixed", {}, 64, 2048, found_rates("mixed, 64 slots, 2048 tokens", 9.0, 11.0, 9.5))
    better = Advised("keep", {}, 64, 8192, found_rates("keep, 64 slots, 8192 tokens", 9.5, 10.6, 10.4))
    best = Advised("keep", {}, 64, 8192, found_rates("keep, 64 slots, 8192 tokens", 10.0, 12.1, 10.4))

    def advice(*final: Advised) -> Advice:
        return Advice(START, (), None, 9.0, 32, (), (*final, default), (), 300)

    assert advice(better, plain).best is plain
    assert advice(best, plain).best is best
    one, two = replace(better, engines=1, counted=True), replace(plain, engines=2, counted=True)
    assert advice(one, two).best is one  # but fewer engines count
    assert advice(one, replace(best, engines=1, counted=True)).untold is None
    derived = SimpleNamespace(**{**vars(START), "card": load_card(DERIVED_8)})
    rough = replace(advice(best, plain), start=derived)
    assert rough.best is plain and rough.untold is best  # 9 % more, where the card may be off by 15 %
    said = answer(rough)
    assert said.startswith("Run plain vLLM, without a plug-in, with --max-num-seqs 64")
    assert "keep may hold 10.83: the card cannot tell it from plain vLLM" in said
    edge = replace(best, found=replace(best.found, limited_by=""))
    said = answer(advice(edge, plain))
    assert "holds at most 10.83 requests/s" in said
    assert ", λ*: the runs are too short to say what gives way first" in said
    assert "bears it with as many" not in answer(advice(one, two))


def test_it_declines_where_the_interval_carries_no_answer(headgate):
    """A second of traffic, less than one request takes."""
    words = ["--prompt", 600, "--output", 400, "--seeds", 2, "--jobs", 1, "--requests", 24, "--rate", 30]
    words += ["--slo", "ttft=150ms@p99,tbt=40ms@p99", "--slots", 64]
    run = headgate("advise", *words, "--policy", "mixed", "--cache", "none", "--json", "found.json")
    found = json.loads(Path("found.json").read_text())
    assert found["best"] is None and found["declined"]["requests"] > 24
    answer = flat(run.out.split("\n\n")[1])
    assert answer.startswith("No answer: ") and answer.endswith(
        "leave out --requests and --seeds: runs then get longer until there is an answer."
    )
    assert run.code == 1
    assert "headgate serve" not in run.out and "vllm serve" not in run.out
    assert not any(each["counted"] for each in found["final"]) and "other_times" not in found


def test_what_an_interval_must_be_to_carry_an_answer():
    narrow, wide = found_rates("a", 10, 10.1, 9.9), found_rates("a", 1, 3, 0.2)
    assert declined(narrow, 300, 0.5) is None
    told = declined(wide, 90, 0.5)
    half = half_width(wide.rate)
    assert half > WIDE and told.requests == pytest.approx(90 * (half / CARRIES) ** 2, abs=100)
    assert declined(wide, 90, 0.5, load=0.19) is None  # its low end is 0, but every seed held 0.2
    assert declined(wide, 90, 0.5, load=0.19, lasting=True) is not None
    assert declined(wide, 90, 0.5, load=0.3) is not None
    none = found_rates("a", 1, 3, 0.0)
    assert declined(none, 90, 0.5, load=1e-3) is not None  # a seed that held nothing
    rough = replace(wide, rate=Estimate(6.0, 4.0, 8.0))
    assert declined(rough, 90, 0.5, load=3.0) is None  # one engine, whichever end is true
    assert declined(rough, 90, 0.5, load=5.0) is not None
    assert declined(rough, 90, 60.0, load=5.0).requests == 3600  # ten times the longest stay
    edge = replace(narrow, rate=Estimate(10.0), at_edge=3)  # no interval: λ* with every seed
    assert declined(edge, 300, 20.0).requests == 2000 and declined(edge, 1900, 20.0) is None
    assert declined(edge, 300, 20.0, load=5.9) is None  # 300 were served in 30 s and one stay: 6 a second
    assert declined(edge, 300, 20.0, load=6.1) is not None
    assert declined(edge, 300, 20.0, load=5.9, lasting=True) is not None  # longer runs tell the rate, too
    assert declined(edge, 300, 20.0, load=1.4, lasting=True) is None  # the run would last long enough there


def test_a_load_beyond_one_engine_is_a_fleet(headgate):
    words = [*QUICK, "--cache", "none", "--engines-at-most", 8, "--json", "-"]
    one = json.loads(headgate(*words).out)
    assert one["load"] is None
    most = max(each["found"]["rate"]["value"] for each in one["final"])
    found = json.loads(headgate(*words, "--rate", round(2.5 * most, 1), "--requests", 900).out)
    best = next(each for each in found["final"] if each["found"]["policy"] == found["best"])
    assert best["engines"] >= 3 and best["fleet"]["router"] == "least-loaded"


def test_a_promise_is_needed(refused):
    refused(["advise", "--prompt", 100, "--output", 10], "advise needs a promise, such as --slo ttft=1s@p95")


def test_graphs_are_simulated_as_printed(headgate):
    words = [*QUICK, "--cache", "none", "--card", "cal-h200-qwen3-30b-a3b", "--requests", 40, "--seeds", 1]
    words += ["--rate", 1]
    said = "Keep runs prompts in steps of at most"
    assert said not in flat(headgate(*words).out)
    small = flat(headgate(*words, "--graph", 256).out)
    assert "--max-cudagraph-capture-size 256" in small and "--gpu-memory" not in small
    assert f"{said} 256 tokens" in small


def test_sglang_is_advised_by_its_flags_and_needs_no_plug_in(headgate):
    """Its own flags are tried beside policies that take the plug-in; plain means SGLang's scheduling."""
    run = headgate("advise", "--engine", "sglang", *SMALL, *PROMISE, "--policy", "eb+", "--slots", 64)
    assert run.code == 0, run.err
    said = flat(run.out)
    assert said.split("uniform lengths ")[1].startswith("Run plain SGLang, without a plug-in, with --max-run")
    for part in ("sglang:mixed_chunk=true", "sglang:prefill_decode_interval=1"):
        assert part in said
    assert "vLLM" not in said and "--max-cudagraph-capture-size" not in said
    line = pasted(run.out, "sglang serve")
    assert shlex.split(line)[:3] == ["sglang", "serve", "Qwen/Qwen3-8B"]
    assert "--max-running-requests 64 --chunked-prefill-size" in line


def test_policies_that_fall_behind_are_named_or_kept(headgate):
    """vLLM's old scheduler stalls decodes for prompts: hopeless, where gaps are promised."""
    words = ["advise", *SMALL, *PROMISE, "--slots", 64, "--cache", "none"]
    said = " ".join(headgate(*words, "--policy", "v0", "--policy", "keep").out.split())
    assert "Next policy" in said and "left out after short runs" not in said.lower()
    table = said.partition("Flags tried on long runs")[2]
    assert "v0" in table and "keep" in table


def test_what_is_left_out_has_a_reason():
    def short(name: str, rate: Estimate, dropped: int = 0) -> PolicyRate:
        return replace(found_rates(name, 1.0), rate=rate, limited_by="p99 TBT <= 40 ms", dropped=dropped)

    first = [short("keep", Estimate(9.0)), short("v0", Estimate(0.0))]
    first.append(short("eb+", Estimate(0.0, 0.0, 7.6), 1000))
    chosen = {each.policy: Contender(each.policy, {}) for each in first}
    (said,) = _left_out(first, chosen, {"keep": chosen["keep"]})
    assert "eb+ (< 7.6 requests/s: p99 TBT <= 40 ms gives way first), v0 (0 requests/s: p99" in said


def test_prompts_beyond_the_card_are_said(headgate, tmp_path):
    rows = "".join(f"{at},{30_210 if at == 9 else 500},20\n" for at in range(30))
    (tmp_path / "mine.csv").write_text("arrival,prompt,output\n" + rows)
    words = ["--trace", "mine.csv", "--model-len", 40960, "--slo", "ttft=9s@p95", "--slots", 32]
    words += ["--seeds", 1, "--policy", "mixed", "--requests", 30, "--cache", "none"]
    said = "1 of 30 prompts are longer than the 17,408 tokens that card cal-h200-qwen3-8b was made for"
    assert said in flat(headgate("advise", *words).out)


def test_conversations_are_refused_at_once(headgate, refused):
    """With the command that answers."""
    asked = ["--turns", 3, "--rate", 5, "--prompt", 100, "--output", 10, *PROMISE, "--requests", 60]
    asked += ["--seeds", 1, "--jobs", 1]
    said = refused(["advise", *asked, "--model", "mine", "--engines-at-most", 4], "draws single requests")
    line = said.partition("; ask ")[2]
    assert line.startswith("headgate plan capacity --find engines --turns 3 --rate 5 ")
    assert line.endswith(" --most-engines 4 --router prefix-aware --router least-loaded\n")
    assert headgate(*shlex.split(line)[1:]).code == 0
    alone = refused(["advise", "--turns", 3, *PROMISE], "; ask headgate plan capacity --turns 3 --slo")
    assert "--find" not in alone


def test_the_help_lists_no_flag_that_is_refused(headgate):
    shown = headgate("advise", "--help").out
    assert "--turns" not in shown and "--think" not in shown and "--shared-prefix" in shown
    assert "or all;" not in flat(shown) and "--most-engines" not in shown
    for page in (shown, headgate("plan", "capacity", "--help").out):
        flags = re.findall(r"^  (--\w+)", page, re.M)
        assert not {*flags} & {f"--{word}" for word in ("clients", "patience", "abort", "ttft", *BETWEEN)}


@pytest.mark.parametrize("command", [["advise"], ["plan", "capacity"]])
def test_promises_of_a_run_are_sent_to_slo(refused, command):
    for word in ("ttft", *BETWEEN):
        words = [*command, "--slo", "ttft=1s@p95", f"--{word}", "1s"]
        refused(words, f"--{word} belongs into --slo; drop it")


def test_promises_of_classes_are_printed_as_the_file_that_serve_takes(headgate, tmp_path):
    levels = "ttft=400ms@p95:chat,tbt=60ms@p99:chat,ttft=2s@p95:long text,ttft=2s@p95:été,ttft=2s@p95:a-😀"
    words = ["--classes", "chat=70%,long text=20%,été=5%,a-😀=5%", "--policy", "keep", "--slots", 64]
    run = headgate("advise", *SMALL, "--slo", levels, *words, "--rate", 10, "--cache", "none")
    made = re.search(r'\[classes\.chat\].*\[classes\."a-😀"\].*?(?=\nThis is headgate.toml)', run.out, re.S)
    (tmp_path / "headgate.toml").write_text(made[0])
    classes = tomllib.loads(made[0])["classes"]
    slow = {name: {"ttft": "2000ms"} for name in ("long text", "été", "a-😀")}
    assert classes == {"chat": {"ttft": "400ms", "tbt": "60ms"}} | slow
    ours = next(
        line for line in run.out.replace("\\\n", " ").splitlines() if line.startswith("headgate serve")
    )
    assert headgate(*shlex.split(ours)[1:], "--dry-run").code == 0 and "--config headgate.toml" in ours
