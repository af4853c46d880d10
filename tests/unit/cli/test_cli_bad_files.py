"""Every wrong file is answered with one line that names the file, the place in it and the remedy."""

from __future__ import annotations

import gzip
import json
from importlib.resources import files

import pytest

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:15:46.6805900,100,20\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
MOON = '{"timestamp": 1, "input_length": 3, "output_length": 1}\n'


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "t.csv: the file is empty; give one with requests in it"),
        (" \n\n", "t.csv: the file is empty"),
        (HEAD, "t.csv: a header and no rows"),
        (b"\x00\x01\xff\xfe", "t.csv: not a text file"),
        (gzip.compress(b"abc", mtime=0)[:-4], "t.csv: damaged gzip file"),
        ("foo,bar\n1,2\n", "t.csv:1: not a known trace format", ),
        ('"' + "x" * 300_000, "t.csv:1: not a known trace format"),
        (HEAD + "x" * 3_000_000 + ",1,1\n", "t.csv:2: broken CSV, field larger than field limit"),
        (HEAD + "nan,1,1\n", "t.csv:2: TIMESTAMP is 'nan', not a time such as"),
        (HEAD + ROW.replace("100", "-1"), "t.csv:2: ContextTokens is -1, not a length"),
        (HEAD + ROW.replace("100", "0"), "t.csv:2: ContextTokens is 0"),
        (HEAD + ROW.replace("100", "nan"), "t.csv:2: ContextTokens is nan, not a finite number"),
        (HEAD + ROW.replace("100", "1e30"), "t.csv:2: ContextTokens is 1000000"),
        (HEAD + ROW.replace("100", "1.5"), "t.csv:2: ContextTokens is 1.5, not a whole number"),
        (HEAD + ROW + "a,b\n", "t.csv:3: 2 fields where the header has 3; fix the row or pass"),
        (VIDUR + "nan,1,1\n", "t.csv:2: arrived_at is nan, not a finite number"),
        (VIDUR + "-1,1,1\n", "t.csv:2: arrived_at is -1, before the start"),
        (VIDUR + "1e309,1,1\n", "t.csv:2: arrived_at is 1e309, not a finite number"),
        (VIDUR + "0,1,1\n1e29,1,1\n", "arrival at row 1 is 9.999999999999998e+19; times are seconds"),
        (MOON + "[1]\n", "t.csv:2: not a JSON object"),
        (MOON + '{"timestamp": NaN, "input_length": 3, "output_length": 1}\n', "t.csv:2: timestamp is nan"),
        (MOON[:-2], "t.csv:1: not a known trace format"),
        (MOON + MOON[:-2], "t.csv:2: not a JSON object"),
    ],
)  # fmt: skip
def test_traces(refused, tmp_path, text, fragment):
    (tmp_path / "t.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(["simulate", "--trace", "t.csv"], fragment)


def test_bad_rows_only(refused, tmp_path):
    (tmp_path / "t.csv").write_text(HEAD + "x,1,1\n")
    refused(
        ["simulate", "--trace", "t.csv", "--skip-bad-rows"], "all 1 rows are bad, line 2", "check the format"
    )


@pytest.mark.parametrize(("name", "fragment"), [("azur", "did you mean 'azure'?"), ("vidur", "no column")])
def test_trace_formats(refused, tmp_path, name, fragment):
    (tmp_path / "t.csv").write_text(HEAD + ROW)
    refused(["simulate", "--trace", "t.csv", "--format", name], fragment)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "l.txt: the file is empty"),
        ("a\n", "l.txt: no lengths in it; give one per line"),
        ("10\nx\n", "l.txt:2: the length is 'x', not a number; fix the line"),
        ("-5\n10\n", "l.txt:1: the length is -5, not a length"),
        ("1.5\n10\n", "l.txt:1: the length is 1.5, not a whole number"),
        ("nan\n10\n", "l.txt:1: the length is nan"),
        ("a,b\n1,2\n", "l.txt: several columns; name one of: a, b"),
        ('"' + "x" * 200_000, "l.txt:1: field larger than field limit"),
    ],
)
def test_length_files(refused, tmp_path, text, fragment):
    (tmp_path / "l.txt").write_text(text)
    refused(["simulate", "--workload", "lengths=l.txt"], fragment)


CLASS = '[[classes]]\nname = "a"\nprompt = 50\noutput = 9\nshare = 1\n'
STAGE = "[[stages]]\nrequests = 30\n"
TOML = [
    ("x=", "not valid TOML", "fix the file"),
    ("a = [\n1,\n\n?", "line 4"),
    ("a=" + "[" * 5000, "cannot be read: maximum recursion depth"),
    ("slots=" + "9" * 5000, "cannot be read"),
    (b"\xff\xfe", "not UTF-8 text; give a TOML file"),
    ("polcy='eb'", "unknown field 'polcy'; did you mean 'policy'?"),
    ("nested.field=3", "unknown field 'nested'"),
    ("slots='5'", "slots: 5 is not allowed; give a whole number, without quotes"),
    ("slots=1.5", "slots: 1.5 is not allowed; give a whole number"),
    ("slots=true", "slots: True is not allowed; give a whole number"),
    ("slots=0", "slots: 0 is not allowed; give at least 1"),
    ("slots=2020-01-01", "slots: 2020-01-01 is not allowed"),
    ("rate=true", "rate: True is not allowed; give a number"),
    ("rate='5'", "rate: 5 is not allowed; give a number, without quotes"),
    ("prompt=nan", "prompt: nan is not allowed; give a finite number"),
    ("skip_bad_rows=1", "skip_bad_rows: 1 is not allowed; give true or false"),
    ("policy=3", "policy: 3 is not allowed; give a text in quotes"),
    ("trace=1", "trace: 1 is not allowed; give a text in quotes"),
    ("ttft='x'", "ttft: 'x' is not a duration; write 500ms"),
    ("ttft=true", "ttft: True is not allowed"),
    ("watchdog=inf", "watchdog: inf is not allowed; give a finite number"),
    ("ttft=500", "ttft: '500' has no unit; write 500ms or 500s"),
    ("tpot='50ms'\ntbt='60ms'", "--tbt promises every gap, --tpot the mean of a request; drop one"),
    ("seed=-1", "seed: -1 is not allowed; give at least 0"),
    ("set=3", "set: 3 is not allowed; give a table"),
    ("[set]\nx=[1]", "set.x: [1] is not a setting; give a number, a text, true or false"),
    ("policy='eb'\n[set]\nrefill=true", "refill='true' is not a whole number"),
    ("policy='eb'\n[set]\nrefill=4.0", "refill='4.0' is not a whole number"),
    ("policies=['mixed','v0']", "choose one with --policy or use compare"),
    ("policies=[]", "policies: the list is empty"),
    ("policies=['mixed',3]", "policies.1: 3 is not allowed"),
    ("policies='mixed'", "policies: mixed is not allowed; give a list"),
    ("kv-tokens=100\nkv_tokens=200", "'kv_tokens' is given twice"),
    ("trace=\"a\\u0000b.csv\"", "cannot be read"),
    ("card=\"a\\u0000/b\"", "give a readable file"),
    # classes
    ("classes=[]", "classes: the list is empty; fill it or drop the setting"),
    ("classes=3", "classes: 3 is not allowed; give a list"),
    ("classes=[3]", "classes.0: 3 is not allowed; give a table\n"),
    ("[[classes]]", "field 'classes.0.name' is missing; add it\n"),
    ("[[classes]]\nname='a'\nshare=1\nprompt=9", "classes.a: no output; give its mean, such as output = 200"),
    ("[[classes]]\nname='a'", "classes.a: neither share nor clients; give one: a share of the rate, or"),
    (CLASS + CLASS, "2 kinds are called 'a'; give each its own name"),
    (CLASS.replace("1", "0"), "classes.0.share: 0 is not allowed; give a number above 0"),
    (CLASS.replace("1", "nan"), "classes.0.share: nan is not allowed"),
    (CLASS.replace("share = 1", "shar = 1"), "unknown field 'classes.0.shar'; did you mean 'share'?\n"),
    (CLASS.replace("1", "1e308") + CLASS.replace("1", "1e308").replace('"a"', '"b"'), "give smaller numbers"),
    (CLASS + "[classes.x]\ny=1", "unknown field 'classes.0.x'"),
    (CLASS + "clients=3", "classes.a: share and clients; give one: a share of the rate, or its own"),
    (CLASS + "weight=0", "classes.a: weight=0; give a number above 0\n"),
    (CLASS + "weight=inf", "classes.0.weight: inf is not allowed"),
    (CLASS + "weight='heavy'", "classes.0.weight: heavy is not allowed; give a number, without quotes"),
    (
        CLASS + "background=true\nttft='5s'",
        "classes.a: background and ttft=5s; background promises nothing: drop one\n",
    ),
    (CLASS + "background=1", "classes.0.background: 1 is not allowed; give true or false"),
    (CLASS + CLASS.replace('"a"', '"b"').replace("share", "clients"), "classes.b: clients send beside"),
    ("rate=2\n" + CLASS.replace("share", "clients"), "classes.a: clients, and no class comes at a rate"),
    (
        "rate=2\nturns=2\n" + CLASS + CLASS.replace('"a"', '"b"').replace("share", "clients"),
        "--turns does not go with clients of a class (b); drop one of the two",
    ),
    (CLASS + "workload='nope'", "unknown length law 'nope'"),
    (CLASS + "shape=2", "classes.0: --shape belongs to gamma lengths"),
    (CLASS + "priority=99999999999", "priority at row 0"),
    ("ttft='1s'\n" + CLASS, "--ttft", "say it in each [[classes]] table"),
    ("prompt=4\n" + CLASS, "--prompt", "say it in each [[classes]] table"),
    ("workload='fixed'\n" + CLASS, "--workload", "say it in each [[classes]] table"),
    ("patience='1s'\n" + CLASS + "patience='2s'", "class 'a' has its own; say it in one place"),
    ("trace='azure-conv'\n" + CLASS, "[[classes]] makes lengths, but --trace brings its own"),
    # stages
    ("stages=[]", "stages: the list is empty"),
    ("[[stages]]", "field 'stages.0.requests' is missing; add it\n"),
    (STAGE.replace("30", "0"), "stages.0.requests: 0 is not allowed; give at least 1"),
    (STAGE.replace("30", "99999999999"), "too many for one run"),
    (STAGE + "promt=3", "unknown field 'stages.0.promt'; did you mean 'prompt'?"),
    (STAGE + "rate=5\nclients=5", "run them one by one"),
    (STAGE + "rate=5\n" + STAGE, "stage 1 has no rate, others have; add it or give --rate"),
    (STAGE + "clients=5\n" + STAGE, "stage 1 has no clients, others have"),
    ("clients=4\n" + STAGE + "rate=5", "the load is of another kind; choose one"),
    ("rate=4\n" + STAGE + "clients=5", "the load is of another kind; choose one"),
    ("arrivals='all-at-once'\n" + STAGE + "rate=5", "the load is of another kind"),
    ("arrivals='all-at-once'\n" + STAGE + "clients=5", "the load is of another kind"),
    ("rate=4\n" + STAGE + "rate=5", "--rate is replaced by every stage's own; drop it"),
    ("prompt=4\n" + STAGE + "prompt=5", "--prompt is replaced by every stage's own; drop it"),
    ("requests=20\n" + STAGE, "20 requests, but the stages have 30; make them agree"),
    (STAGE + "prompt=10\n" + CLASS, "give laws instead"),
    ("trace='azure-conv'\n" + STAGE, "[[stages]] makes lengths"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "fragments"), [(text, fragments) for text, *fragments in TOML])
def test_experiments(refused, tmp_path, text, fragments):
    (tmp_path / "e.toml").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(["simulate", "e.toml"], *fragments)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "mix file m.toml: must hold [[classes]] tables and nothing else"),
        ("slots=3\n" + CLASS, "mix file m.toml: must hold"),
        ("classes=[]", "mix file m.toml: classes: the list is empty"),
        ("x=", "mix file m.toml: not valid TOML"),
        (CLASS + "shar=2", "mix file m.toml: unknown field 'classes.0.shar'; did you mean 'share'?"),
    ],
)
def test_mixes(refused, tmp_path, text, fragment):
    (tmp_path / "m.toml").write_text(text)
    refused(["simulate", "--mix", "m.toml"], fragment)


def test_promises_of_a_mix_stand_in_its_classes(refused, tmp_path):
    (tmp_path / "m.toml").write_text(CLASS)
    refused(["simulate", "--mix", "m.toml", "--ttft", "1s"], "--ttft does not reach the classes of a mix")


def _card(**changes):
    card = json.loads((files("headgate") / "cards" / "linear-h200-qwen3-8b.json").read_text())
    for path, value in changes.items():
        *parents, name = path.split("__")
        place = card
        for parent in parents:
            place = place[parent]
        place[name] = value
    return json.dumps(card)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "card c.json, line 1, column 1: not valid JSON"),
        ("{\n 'a'", "card c.json, line 2"),
        ("[]", "must be a JSON object"),
        ("{}", "field 'model' is missing; add it (and 7 more)"),
        ("[" * 100_000, "card c.json: cannot be read: maximum recursion depth"),
        ('{"name": ' + "9" * 5000 + "}", "card c.json: cannot be read"),
        (b"\xff\xfe", "not UTF-8 text; give a readable file or one"),
        (_card(foo=1), "unknown field 'foo'"),
        (_card(kv_tokens=0), "kv_tokens"),
        (_card(kv_tokens=1.5), "kv_tokens"),
        (_card(region=3), "region"),
        (_card(coefficients__decode__constant=-1), "constant must be a finite number, zero or more"),
        (_card(coefficients__decode__constant=1e300), "constant must be a finite number"),
        (_card(coefficients__decode__consant=1), "did you mean 'constant'?"),
        (_card(max_model_len=1), "no request fits"),
    ],
    ids=lambda value: "" if len(value) > 80 else None,
)
def test_cards(refused, tmp_path, text, fragment):
    (tmp_path / "c.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(["simulate", "--card", "c.json"], fragment)


def test_small_cards_have_small_defaults(headgate, tmp_path):
    (tmp_path / "c.json").write_text(
        "\N{ZERO WIDTH NO-BREAK SPACE}" + _card(max_batch_tokens=4, max_running=9)
    )
    said = headgate("simulate", "--card", "c.json", "--requests", 3, "--prompt", 4, "--output", 4)
    assert said.code == 0 and said.err == ""


@pytest.mark.parametrize("zero", [["decode"], ["decode", "prefill", "mixed"]])
@pytest.mark.parametrize("load", [["--rate", 5], ["--clients", 4], ["--arrivals", "all-at-once"]])
def test_steps_that_take_no_time(headgate, tmp_path, zero, load):
    card = json.loads(_card())
    for part in zero:
        terms = card["coefficients"][part]
        card["coefficients"][part] = {name: [0, 0, 0] if name == "by_share" else 0 for name in terms}
    (tmp_path / "c.json").write_text(json.dumps(card))
    for policy in ("mixed", "eb:refill=4"):
        said = headgate("simulate", "--card", "c.json", "--requests", 50, *load, "--policy", policy)
        assert said.code == 0 and said.err == ""
