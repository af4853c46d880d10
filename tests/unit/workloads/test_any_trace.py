"""Traces with columns of any name, times in any unit, and result files of benchmark tools."""

import json

import pytest

from headgate.core.errors import InputError
from headgate.workloads import read_trace
from headgate.workloads.times import unit_of

COLUMNS = "arrival=ts,prompt=input,output=out,class=tenant"


def written(tmp_path, text, name="mine.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_columns_by_name_with_classes(tmp_path):
    path = written(tmp_path, "ts,tenant,input,out\n0.5,paid,100,20\n0.75,free,200,30\n")
    workload, _ = read_trace(path, columns=COLUMNS)
    assert workload.arrival.tolist() == [0.5, 0.75] and workload.prompt.tolist() == [100, 200]
    assert [workload.kinds[place].name for place in workload.kind] == ["paid", "free"]


def test_columns_of_json_lines(tmp_path):
    path = written(tmp_path, '{"ts": 1, "input": 3, "out": 4, "tenant": 7}\n', "mine.jsonl")
    workload, _ = read_trace(path, columns=COLUMNS)
    assert (workload.prompt[0], workload.output[0], workload.kinds[0].name) == (3, 4, "7")


@pytest.mark.parametrize(
    ("times", "seconds", "said"),
    [
        (["0", "250", "4000"], [0, 0.25, 4], "milliseconds"),
        (["0", "2000000", "4000000"], [0, 2, 4], "microseconds"),
        (["1700000000", "1700000001", "1700000002"], [0, 1, 2], "dates, seconds since 1970"),
        (["1700000000000", "1700000000500", "1700000001000"], [0, 0.5, 1], "dates, milliseconds since 1970"),
        (["2023-11-16T18:15:46Z", "2023-11-16T18:15:46.5Z", "2023-11-16T18:15:48Z"], [0, 0.5, 2], "dates"),
        (["0", "2", "5"], [0, 2, 5], None),
        (["0.5", "90.25", "300.125"], [0.5, 90.25, 300.125], None),
    ],
)
def test_units_of_time_are_recognised_and_said(tmp_path, times, seconds, said):
    rows = "".join(f"{time},5,6\n" for time in times)
    workload, _ = read_trace(
        written(tmp_path, f"ts,input,out\n{rows}"), columns="arrival=ts,prompt=input,output=out"
    )
    assert workload.arrival.tolist() == pytest.approx(seconds)
    told = workload.origin.get("times")
    assert told is None if said is None else f"arrivals are read as {said}" in str(told)


def test_the_user_may_name_the_unit():
    assert unit_of([0, 250, 4000], "s").ticks == 1
    with pytest.raises(InputError, match="unknown unit of time 'm'"):
        unit_of([0, 250], "m")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("arrival=ts", "--columns names no prompt; write arrival=COLUMN"),
        ("when=ts,prompt=a,output=b", "unknown role in --columns 'when'"),
        ("prompt=input,output=missing", "no column 'missing'.*the file has ts, input"),
        ("prompt=input,prompt=ts,output=input", "names prompt twice"),
        ("prompt", "is not ROLE=COLUMN"),
    ],
)
def test_wrong_columns_are_one_line(tmp_path, columns, message):
    with pytest.raises(InputError, match=message):
        read_trace(written(tmp_path, "ts,input\n1,2\n"), columns=columns)


def test_an_unknown_file_names_its_columns_and_the_remedy(tmp_path):
    with pytest.raises(InputError, match=r"--columns arrival=\.\.,prompt=\.\.,output=\.\.; it has ts, input"):
        read_trace(written(tmp_path, "ts,input\n1,2\n"))


VLLM = {"request_throughput": 2.0, "start_times": [30.5, 30.0], "input_lens": [5, 6], "output_lens": [7, 8]}


def _aiperf(at):
    lengths = {"input_sequence_length": {"value": 5 + at}, "output_sequence_length": {"value": 8 - at}}
    return {"metadata": {"request_start_ns": 10**18 + at * 10**8}, "metrics": lengths}


AIPERF = [_aiperf(5), _aiperf(0)]
GUIDELLM = {"benchmarks": [{"requests": {"successful": [
    {"start_time": 9.5, "prompt_tokens": 5, "output_tokens": 7},
    {"start_time": 9.0, "prompt_tokens": 6, "output_tokens": 8}]}}]}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("vllm-bench", json.dumps(VLLM), [6, 5]),
        ("vllm-bench", json.dumps(VLLM, indent=2), [6, 5]),
        ("aiperf", "\n".join(map(json.dumps, AIPERF)), [5, 10]),
        ("guidellm", json.dumps(GUIDELLM), [6, 5]),
    ],
)
def test_result_files_of_benchmarks(tmp_path, name, text, prompts):
    workload, bad = read_trace(written(tmp_path, text, "result.json"))
    assert workload.origin["format"] == name and not bad.count
    assert workload.arrival.tolist() == [0.0, 0.5] and workload.prompt.tolist() == prompts


def test_a_result_without_details_says_how_to_get_them(tmp_path):
    with pytest.raises(InputError, match="run it with --save-detailed"):
        read_trace(written(tmp_path, '{"request_throughput": 3.0}', "result.json"))


def test_several_benchmarks_in_one_file_are_refused(tmp_path):
    twice = {"benchmarks": GUIDELLM["benchmarks"] * 2}
    with pytest.raises(InputError, match="2 benchmarks, at different loads"):
        read_trace(written(tmp_path, json.dumps(twice), "result.json"))


def test_lengths_of_servegen(tmp_path):
    line = '{"request_id": 0, "type": "text", "input_length": 61, "output_length": 2370, "duration": 14000}\n'
    workload, _ = read_trace(written(tmp_path, line, "trace_d.jsonl"))
    assert (workload.prompt[0], workload.output[0], workload.origin["format"]) == (
        61,
        2370,
        "servegen-offline",
    )
