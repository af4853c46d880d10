"""Traces with columns of any name, times in any unit, and result files of benchmark tools."""

import json

import pytest

from headgate.core.errors import InputError
from headgate.workloads.formats import unit_of
from headgate.workloads.traces import read_trace, write_mooncake

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


def test_a_header_that_names_the_roles_needs_no_columns(tmp_path):
    text = "arrival,prompt,output\n0.5,100,20\n0.75,200,30\n"
    plain, classes = written(tmp_path, text), written(tmp_path, text.replace("\n", ",class\n", 1), "two.csv")
    classes.write_text(classes.read_text().replace(",20\n", ",20,paid\n").replace(",30\n", ",30,free\n"))
    workload, _ = read_trace(plain)
    assert workload.arrival.tolist() == [0.5, 0.75] and workload.output.tolist() == [20, 30]
    workload, _ = read_trace(classes)
    assert [workload.kinds[place].name for place in workload.kind] == ["paid", "free"]
    with pytest.raises(InputError, match="no column 'TIMESTAMP'; azure needs"):
        read_trace(plain, format="azure")


@pytest.mark.parametrize("between", [";", "\t"])
def test_columns_between_other_separators(tmp_path, between):
    text = "Start Time,tenant,input,out\n2026-11-02T09:00:00,a b,100,20\n2026-11-02T09:00:01.5,c,200,30\n"
    path = written(tmp_path, text.replace(",", between))
    workload, _ = read_trace(path, columns="arrival=Start Time,prompt=input,output=out,class=tenant")
    assert workload.arrival.tolist() == [0, 1.5] and workload.prompt.tolist() == [100, 200]
    with pytest.raises(InputError, match="it has Start Time, tenant, input, out"):
        read_trace(path)


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
    assert unit_of([0.0, 250.0, 4000.0], "s").ticks == 1
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


@pytest.mark.parametrize("as_json", [False, True])
def test_what_requests_share_may_have_any_name(tmp_path, as_json):
    """Two turns of one chat behind a system prompt, then a row that shares nothing."""
    rows = [
        ("1", "100", "5", "a", "s", "40"),
        ("2", "150", "5", "a", "s", "40"),
        ("3", "90", "5", "", "", ""),
    ]
    names = ("at", "in", "out", "chat", "system", "length")
    lines = [",".join(names), *(",".join(row) for row in rows)]
    if as_json:
        lines = [json.dumps({k: v for k, v in zip(names, row, strict=True) if v}) for row in rows]
    text = "arrival=at,prompt=in,output=out,session=chat,prefix=system,prefix_tokens=length"
    workload, _ = read_trace(written(tmp_path, "\n".join(lines)), columns=text)
    first, second, third = workload.pieces()
    assert [[size for _, size in pieces] for pieces in (first, second, third)] == [[40, 60], [40, 110], [90]]
    assert [key for key, _ in first] == [key for key, _ in second]
    with pytest.raises(InputError, match="no column 'chats'"):
        read_trace(written(tmp_path, "a,b\n1,2\n"), columns="prompt=a,output=b,session=chats")


def test_an_unknown_file_names_its_columns_and_the_remedy(tmp_path):
    with pytest.raises(InputError, match=r"--columns arrival=ts,prompt=input,output=\.\.; it has ts, inp"):
        read_trace(written(tmp_path, "ts,input\n1,2\n"))


def test_usual_names_need_no_columns_and_what_is_not_read_is_said(tmp_path):
    rows = "2024-01-01T00:00:00+02:00,5,6,a,eu\n2024-01-01T00:00:01.5+02:00,7,8,b,us\n"
    path = written(tmp_path, "Created at,prompt_tokens,completion_tokens,tenant,region\n" + rows)
    workload, _ = read_trace(path)
    assert workload.arrival.tolist() == [0, 1.5] and workload.output.tolist() == [6, 8]
    assert workload.tenants == ("a", "b")
    assert workload.remarks[-1] == "columns that are not read and change nothing: region"
    with pytest.raises(InputError, match="--columns arrival=when,prompt=in,output=outs; it has when, in"):
        read_trace(written(tmp_path, "when,in,outs\n1,2,3\n"))


def test_a_log_with_the_names_of_a_tool_is_a_log(tmp_path):
    line = '{"start_time": 5.0, "prompt_tokens": 3, "output_tokens": 4}\n'
    assert read_trace(written(tmp_path, line, "mine.jsonl"))[0].prompt.tolist() == [3]


def test_dates_have_no_unit(tmp_path):
    """Read as milliseconds, ten seconds were four months."""
    path = written(tmp_path, "time,prompt,output\n2026-11-03T09:00:00,10,20\n2026-11-03T09:00:10,10,20\n")
    assert read_trace(path)[0].arrival.tolist() == [0, 10]
    with pytest.raises(InputError, match="--times ms, but the arrivals are dates; drop --times"):
        read_trace(path, times="ms")


def test_times_with_and_without_a_zone_are_not_mixed(tmp_path):
    rows = "2024-01-01T00:00:00+02:00,5,6\n2024-01-01 00:00:01,7,8\n"
    path = written(tmp_path, "arrival,prompt,output\n" + rows)
    with pytest.raises(InputError, match=r"mine.csv:3: arrival is without a time zone, unlike the rows"):
        read_trace(path)
    assert read_trace(path, skip_bad_rows=True)[1].count == 1


# As the tools write them, with the fields that are not read: two requests, the later one first.
VLLM = {
    "date": "20261116-213000", "backend": "openai", "model_id": "Qwen/Qwen3-8B", "num_prompts": 2,
    "request_rate": 2.0, "burstiness": 1.0, "max_concurrency": None, "duration": 1.2, "completed": 2,
    "failed": 0, "total_input_tokens": 11, "total_output_tokens": 15, "request_throughput": 2.0,
    "request_goodput": None, "output_throughput": 12.5, "start_times": [881.5, 881.0],
    "input_lens": [5, 6], "output_lens": [7, 8], "ttfts": [0.02, 0.03], "itls": [[0.01], [0.01]],
    "generated_texts": ["a", "b"], "errors": ["", ""], "mean_ttft_ms": 25.0,
}  # fmt: skip


def _aiperf(at):
    start = 1_759_813_207_532_900_363 + at * 10**8
    metadata = {
        "session_num": at, "x_request_id": "7609a2e7", "x_correlation_id": "32ee4f33", "turn_index": 0,
        "request_start_ns": start, "request_ack_ns": start + 10**6, "request_end_ns": start + 10**7,
        "worker_id": "worker_359d423a", "benchmark_phase": "profiling", "was_cancelled": False,
    }  # fmt: skip
    metrics = {
        "input_sequence_length": {"value": 5 + at, "unit": "tokens"},
        "time_to_first_token": {"value": 255.9, "unit": "ms"},
        "output_token_count": {"value": 8 - at, "unit": "tokens"},
        "inter_chunk_latency": {"value": [4.9, 5.3], "unit": "ms"},
        "output_sequence_length": {"value": 8 - at, "unit": "tokens"},
    }
    return {"metadata": metadata, "metrics": metrics, "error": None}


def _aiperf_failed():
    failed = _aiperf(3)
    error = {"code": 499, "type": "RequestCancellationError", "message": "cancelled"}
    return failed | {"metrics": {"error_isl": {"value": 550, "unit": "tokens"}}, "error": error}


AIPERF = [_aiperf(5), _aiperf(0)]


def _guidellm(start, prompt, output, old):
    times = {"start_time": start} if old else {"request_start_time": start, "request_end_time": start + 1}
    return {"request_id": "r", "output": "text", "prompt_tokens": prompt, "output_tokens": output, **times}


def _guidellm_report(old, every=2):
    done = [_guidellm(1759813209.5, 5, 7, old), _guidellm(1759813209.0, 6, 8, old)]
    totals = {"successful": every, "incomplete": 0, "errored": 0, "total": every}
    counted = {"request_totals": totals} if old else {"metrics": {"request_totals": totals}}
    requests = {"successful": done, "incomplete": [], "errored": [], "total": None}
    benchmark = {"type_": "generative_benchmark", "requests": requests, **counted}
    return {"metadata": {"version": 1}, "benchmarks": [benchmark]}


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("vllm-bench", json.dumps(VLLM), [6, 5]),
        ("vllm-bench", json.dumps(VLLM, indent=2), [6, 5]),
        ("aiperf", "\n".join(map(json.dumps, AIPERF)), [5, 10]),
        ("guidellm", json.dumps(_guidellm_report(old=True)), [6, 5]),
        ("guidellm", json.dumps(_guidellm_report(old=False), indent=4), [6, 5]),
    ],
)
def test_result_files_of_benchmarks(tmp_path, name, text, prompts):
    workload, bad = read_trace(written(tmp_path, text, "result.json"))
    assert workload.origin["format"] == name and not bad.count
    assert workload.arrival.tolist() == [0.0, 0.5] and workload.prompt.tolist() == prompts


@pytest.mark.parametrize(
    "text",
    [
        "\n".join(map(json.dumps, [_aiperf_failed(), *AIPERF])),
        json.dumps(
            VLLM | {"output_lens": [0, 8, 7], "input_lens": [4, 6, 5], "start_times": [1.0, 3.0, 2.5]}
        ),
    ],
)
def test_requests_that_failed_are_bad_rows(tmp_path, text):
    path = written(tmp_path, text, "result.json")
    workload, bad = read_trace(path, skip_bad_rows=True)
    assert len(workload) == 2 and bad.count == 1
    with pytest.raises(InputError, match=r"result.json:1: .*pass --skip-bad-rows"):
        read_trace(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"request_throughput": 3.0}', "run it with --save-detailed"),
        (json.dumps(VLLM) + "\n" + json.dumps(VLLM), "keep one result of vllm-bench in the file"),
        (json.dumps({"benchmarks": _guidellm_report(old=False)["benchmarks"] * 2}), "2 benchmarks, at diff"),
        (json.dumps(_guidellm_report(old=False, every=900)), "a sample of 2 of 900 requests"),
        (json.dumps(_guidellm_report(old=True, every=900)), "a sample of 2 of 900 requests"),
    ],
)
def test_results_without_every_request_say_how_to_get_them(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read_trace(written(tmp_path, text, "result.json"))


def test_lengths_of_servegen(tmp_path):
    line = '{"request_id": 0, "type": "text", "input_length": 61, "output_length": 2370, "duration": 14000}\n'
    workload, _ = read_trace(written(tmp_path, line, "trace_d.jsonl"))
    assert (workload.prompt[0], workload.output[0], workload.origin["format"]) == (
        61,
        2370,
        "servegen-offline",
    )


def test_tenants_by_name_and_by_their_own_header(tmp_path):
    rows = "0,100,20,chat,acme\n1,200,30,batch,acme\n2,300,40,chat,blue\n"
    named, _ = read_trace(
        written(tmp_path, "ts,in,out,kind,team\n" + rows),
        columns="arrival=ts,prompt=in,output=out,class=kind,tenant=team",
    )
    told, _ = read_trace(written(tmp_path, "arrival,prompt,output,class,tenant\n" + rows))
    assert named == told and told.tenants == ("acme", "blue") and told.tenant.tolist() == [0, 0, 1]
    lines = '{"timestamp": 0, "input_length": 5, "output_length": 6, "tenant": "x"}\n'
    lines += '{"timestamp": 10, "input_length": 5, "output_length": 6, "tenant": 7}\n'
    lines += '{"timestamp": 20, "input_length": 5, "output_length": 6}\n'
    mooncake, _ = read_trace(written(tmp_path, lines, "mine.jsonl"))
    assert mooncake.tenants == ("x", "7", "") and mooncake.tenant.tolist() == [0, 1, 2]
    write_mooncake(mooncake, tmp_path / "again.jsonl")
    assert read_trace(tmp_path / "again.jsonl")[0] == mooncake


def test_a_tenant_column_that_is_not_named_is_not_read(tmp_path):
    path = written(tmp_path, "ts,tenant,input,out\n0.5,paid,100,20\n0.75,free,200,30\n")
    workload, _ = read_trace(path, columns=COLUMNS)  # it is the class there
    assert workload.tenants == ("",) and len(workload.kinds) == 2
    with pytest.raises(InputError, match="no column 'team'"):
        read_trace(path, columns="prompt=input,output=out,tenant=team")
    holes = written(tmp_path, "arrival,prompt,output,tenant\n0,1,2,\n")
    with pytest.raises(InputError, match="tenant is missing; fix the row"):
        read_trace(holes)
