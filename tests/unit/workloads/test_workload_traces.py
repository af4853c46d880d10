"""Readers for published traces, the writer, and the bundled traces."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.core.errors import InputError
from headgate.workloads import Workload, generate, read_trace
from headgate.workloads.arrivals import Poisson
from headgate.workloads.formats import FORMATS
from headgate.workloads.lengths import Uniform
from headgate.workloads.traces import BUNDLED, bundled, write_mooncake

DATA = Path(__file__).parents[2] / "data"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
VIDUR = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


@pytest.fixture
def trace(tmp_path):
    def write(content):
        path = tmp_path / "t.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.mark.parametrize(
    ("file", "format", "rows", "arrivals", "prompts", "outputs"),
    [
        ("azure_2023_conv_head.csv", "azure", 30, [0.0, 4.314579, 4.541877], [374, 396, 879], [44, 109, 55]),
        ("mooncake_conversation_head.jsonl", "mooncake", 20, [0.0] * 3, [6758, 7322, 7236], [500, 490, 794]),
        (
            "vidur_splitwise_code_head.csv",
            "vidur",
            30,
            [0.0, 0.052, 0.098189],
            [4808, 3180, 110],
            [10, 8, 27],
        ),
        ("vidur_arxiv_lengths_head.csv", "vidur", 30, [0.0] * 3, [3772, 2015], [54, 156]),
        ("vtc_arena_head.csv", "vtc", 40, [0.0, 0.207938, 0.441893], [13, 36, 456], [199, 137, 156]),
        ("etalon_sharegpt_lengths_head.csv.gz", "vidur", 30, [0.0] * 3, [74, 290], [918, 905]),
    ],
)
@pytest.mark.parametrize("told", [True, False], ids=["told", "guessed"])
def test_published_files(file, format, rows, arrivals, prompts, outputs, told):
    table, bad = read_trace(DATA / file, format if told else None)
    assert len(table) == rows and bad.count == 0 and bad.first == ()
    assert table.origin["format"] == format and table.origin["trace"] == file
    assert table.name == file.split(".")[0]
    assert table.arrival[:3].tolist() == pytest.approx(arrivals, abs=1e-9)
    assert table.prompt[: len(prompts)].tolist() == prompts
    assert table.output[: len(outputs)].tolist() == outputs


def test_clients_become_kinds():
    table, _ = read_trace(DATA / "vtc_arena_head.csv")
    names = [kind.name for kind in table.kinds]
    assert [names[kind] for kind in table.kind[:3]] == ["client-13", "client-2", "client-0"]
    assert names == sorted(names, key=lambda name: int(name.removeprefix("client-")))


def test_lengths_alone_wait_for_arrivals_or_clients():
    table, _ = read_trace(DATA / "vidur_arxiv_lengths_head.csv")
    assert not table.arrival.any() and not table.closed
    assert table.as_closed(8).closed
    assert np.ptp(table.arriving(np.arange(30)).arrival) == 29


def test_azure_2024_zones_and_missing_fractions(trace):
    path = trace(
        AZURE
        + "2024-05-10 00:00:00.009930+00:00,2162,5\n"
        + "2024-05-10 00:00:01+00:00,2399,6\n"
        + "2024-05-10 02:00:01.5+02:00,76,15\n"
    )
    assert read_trace(path)[0].arrival.tolist() == [0.0, 0.99007, 1.49007]


def test_calendar_times_keep_the_seventh_digit(trace):
    path = trace(AZURE + "2023-11-16 18:15:46.0000001,1,1\n2023-11-16 18:15:46.0000005,1,1\n")
    assert read_trace(path)[0].arrival.tolist() == [0.0, 4e-7]


def test_burstgpt_by_name_in_both_layouts(trace):
    old, _ = read_trace(trace(BURST + "5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,87,230,317,API log\n"))
    new, _ = read_trace(
        trace(
            "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
            "5,12,3.5,ChatGPT,472,18,490,Conversation log\n45,,1.25,GPT-4,87,230,317,API log\n"
        )
    )
    assert old == new and old.origin["format"] == "burstgpt"
    assert old.arrival.tolist() == [5.0, 45.0] and old.prompt.tolist() == [472, 87]


def test_burstgpt_failures_are_bad_rows(trace):
    path = trace(BURST + "5,ChatGPT,472,18,490,x\n6,ChatGPT,0,0,0,x\n7,ChatGPT,9,0,9,x\n8,ChatGPT,1,2,3,x\n")
    with pytest.raises(
        InputError, match=r"t\.csv:3: Request tokens is 0, not a length from 1 to 2147483647; fix the"
    ):
        read_trace(path)
    table, bad = read_trace(path, skip_bad_rows=True)
    assert table.arrival.tolist() == [5.0, 8.0]
    assert bad.count == 2 and [line for line, _ in bad.first] == [3, 4]
    assert bad.first[1][1].startswith("Response tokens is 0")
    assert table.origin["bad_rows"] == 2


def test_only_the_first_bad_rows_are_kept(trace):
    table, bad = read_trace(trace(VIDUR + "0,1,1\n" + "0,0,0\n" * 40), skip_bad_rows=True)
    assert len(table) == 1 and bad.count == 40 and [line for line, _ in bad.first] == [3, 4, 5, 6, 7]


def test_qwen_counts_seconds_mooncake_milliseconds(trace):
    row = '{"chat_id": 1, "parent_chat_id": -1, "timestamp": 61.5, "input_length": 5, "output_length": 7}\n'
    assert read_trace(trace(row))[0].origin["format"] == "qwen"
    assert read_trace(trace(row))[0].arrival.tolist() == [61.5]
    assert read_trace(trace(row), "mooncake")[0].arrival.tolist() == [0.0615]


def test_gzip_is_told_by_content(trace):
    plain = (DATA / "azure_2023_conv_head.csv").read_bytes()
    assert read_trace(trace(gzip.compress(plain, mtime=0)))[0] == read_trace(trace(plain))[0]


def test_marks_blank_lines_and_missing_last_newline(trace):
    path = trace("\ufeff\n" + VIDUR.replace("\n", "\r\n\r\n") + "0.5, 3 ,4.0\r\n\r\n1,5,6")
    table, _ = read_trace(path)
    assert (table.arrival.tolist(), table.prompt.tolist(), table.output.tolist()) == (
        [0.5, 1],
        [3, 5],
        [4, 6],
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("0,5,0", "num_decode_tokens is 0, not a length from 1"),
        ("0,-5,1", "num_prefill_tokens is -5, not a length from 1"),
        ("0,nan,1", "num_prefill_tokens is nan, not a finite number"),
        ("0,inf,1", "num_prefill_tokens is inf, not a finite number"),
        ("0,1.5,1", "num_prefill_tokens is 1.5, not a whole number"),
        ("0,many,1", "num_prefill_tokens is 'many', not a number"),
        ("0,,1", "num_prefill_tokens is '', not a number"),
        ("0,99999999999,1", "num_prefill_tokens is 99999999999, not a length from 1"),
        ("0," + "9" * 5000 + ",1", "num_prefill_tokens is 9+, not a finite number"),
        ("-1,5,1", "arrived_at is -1, before the start"),
        ("nan,5,1", "arrived_at is nan, not a finite number"),
        (",5,1", "arrived_at is '', not a number"),
        ("0,5", "2 fields where the header has 3"),
        ("0,5,1,9", "4 fields where the header has 3"),
    ],
)
def test_bad_rows_of_csv(trace, row, reason):
    path = trace(VIDUR + "0,1,1\n" + row + "\n1,1,1\n")
    with pytest.raises(
        InputError, match=rf"t\.csv:3: {reason}.*; fix the row or pass --skip-bad-rows$"
    ) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)
    table, bad = read_trace(path, skip_bad_rows=True)
    assert len(table) == 2 and bad.count == 1 and bad.first[0][0] == 3


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ('{"timestamp": 1, "input_length": 5}', "output_length is missing"),
        ('{"input_length": 5, "output_length": 1}', "timestamp is missing"),
        (
            '{"timestamp": NaN, "input_length": 5, "output_length": 1}',
            "timestamp is nan, not a finite number",
        ),
        ('{"timestamp": 1, "input_length": true, "output_length": 1}', "input_length is True, not a number"),
        ('{"timestamp": 1, "input_length": [5], "output_length": 1}', r"input_length is \[5\], not a number"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "input_length is 0, not a length"),
        (
            '{"timestamp": 1, "input_length": 5.5, "output_length": 1}',
            "input_length is 5.5, not a whole number",
        ),
        ("[1, 2]", "not a JSON object"),
        ('{"timestamp": 1', "not a JSON object"),
        ("[" * 100_000, "not a JSON object"),
    ],
)
def test_bad_rows_of_json(trace, row, reason):
    good = '{"timestamp": 1, "input_length": 5, "output_length": 6, "hash_ids": []}\n'
    path = trace(good + row + "\n" + good)
    with pytest.raises(InputError, match=rf"t\.csv:2: {reason}.*; fix the row or pass --skip-bad-rows$"):
        read_trace(path)
    table, bad = read_trace(path, skip_bad_rows=True)
    assert table.prompt.tolist() == [5, 5] and bad.count == 1


@pytest.mark.parametrize("stamp", ["yesterday", "", "2023-13-16 18:15:46.1", "2023-11-16 18:15:46.1x", "5"])
def test_bad_calendar_times(trace, stamp):
    with pytest.raises(InputError, match=r"t\.csv:2: TIMESTAMP is '.*', not a time such as 2023-11-16"):
        read_trace(trace(AZURE + f"{stamp},1,1\n"))


def test_a_client_without_a_name_is_bad(trace):
    with pytest.raises(InputError, match=r"t\.csv:2: client is missing; fix the row"):
        read_trace(trace("arrived_at,client,num_prefill_tokens,num_decode_tokens\n0, ,1,1\n"))


def test_rows_out_of_order_are_sorted(trace):
    path = trace(VIDUR + "0,1,1\n5,2,2\n3,3,3\n")
    assert read_trace(path)[0].prompt.tolist() == [1, 3, 2]


def test_sorted_calendar_times_start_at_the_earliest(trace):
    path = trace(AZURE + "2023-11-16 18:15:46.5,1,1\n2023-11-16 18:15:46,2,2\n")
    table, _ = read_trace(path)
    assert table.arrival.tolist() == [0.0, 0.5] and table.prompt.tolist() == [2, 1]


@pytest.mark.parametrize(
    ("content", "format", "message"),
    [
        ("", None, "the file is empty; give one with requests in it"),
        (" \n\n", None, "the file is empty"),
        (gzip.compress(b"", mtime=0), None, "the file is empty"),
        (AZURE, None, "a header and no rows"),
        (
            "a,b,c\n1,2,3\n",
            None,
            r":1: not a known trace format \(aiperf, ",
        ),
        ('{"a": 1}\n', None, ":1: not a known trace format"),
        ("{broken\n", None, ":1: not a known trace format"),
        (
            "a,b,c\n1,2,3\n",
            "azure",
            ":1: no column 'TIMESTAMP'; azure needs TIMESTAMP, ContextTokens",
        ),
        (VIDUR + "0,1,1\n", "vtc", ":1: no column 'client'"),
        (VIDUR + "0,1,1\n", "mooncake", ":1: not a JSON object; fix the row"),
        (b"\x00\xff\xfe garbage", None, "not a text file; give CSV or JSON lines"),
        (AZURE + "\x00\x00", None, "not a text file"),
        (b"\x1f\x8bgarbage", None, "damaged gzip file; fetch it again"),
        (gzip.compress(AZURE.encode() * 99, mtime=0)[:60], None, "damaged gzip file"),
        (VIDUR + '0,1,"' + "x" * 200_000, None, ":2: broken CSV, field larger than field limit"),
    ],
)
def test_files_that_are_no_traces(trace, content, format, message):
    with pytest.raises(InputError, match=message) as caught:
        read_trace(trace(content), format)
    assert "\n" not in str(caught.value) and "t.csv:" in str(caught.value)


def test_a_file_of_bad_rows_only(trace):
    with pytest.raises(InputError, match=r"all 2 rows are bad, line 1: not a JSON object; check the format"):
        read_trace(trace(VIDUR + "0,1,1\n"), "mooncake", skip_bad_rows=True)


def test_missing_files_and_folders(tmp_path):
    with pytest.raises(InputError, match=r"none\.csv: no such file; check the path"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(InputError, match="is a directory; name a file in it"):
        read_trace(tmp_path)


def test_unknown_format(trace):
    with pytest.raises(InputError, match="unknown trace format 'azzure'; did you mean 'azure'"):
        read_trace(trace(AZURE), "azzure")
    assert set(FORMATS) == {
        *(
            "aiperf",
            "azure",
            "burstgpt",
            "guidellm",
            "headgate-route",
            "mooncake",
            "qwen",
            "servegen-offline",
        ),
        *("vidur", "vllm-bench", "vtc"),
    }


@given(st.binary(max_size=200), st.sampled_from([None, *FORMATS]), st.booleans())
def test_garbage_never_escapes_as_another_error(tmp_path_factory, content, format, skip):
    path = tmp_path_factory.getbasetemp() / "garbage"
    path.write_bytes(content)
    with pytest.raises(InputError) as caught:
        read_trace(path, format, skip_bad_rows=skip)
    assert "\n" not in str(caught.value)


def test_mooncake_written_and_read_back(tmp_path):
    drawn = generate(300, arrivals=Poisson(50), prompt=Uniform(900), output=Uniform(80))
    write_mooncake(drawn, tmp_path / "t.jsonl")
    again, bad = read_trace(tmp_path / "t.jsonl")
    assert bad.count == 0 and again.origin["format"] == "mooncake"
    assert np.array_equal(again.prompt, drawn.prompt) and np.array_equal(again.output, drawn.output)
    assert np.abs(again.arrival - drawn.arrival).max() <= 0.0005 + 1e-9
    assert (tmp_path / "t.jsonl").read_text().splitlines()[0].endswith('"hash_ids": []}')


def test_what_mooncake_cannot_hold(tmp_path):
    table = Workload.of([1], [1])
    with pytest.raises(InputError, match="a closed loop has no arrival times to write"):
        write_mooncake(table.as_closed(1), tmp_path / "t.jsonl")
    with pytest.raises(InputError, match="cannot be written, No such file or directory"):
        write_mooncake(table, tmp_path / "missing" / "t.jsonl")


@pytest.mark.parametrize(
    ("name", "rows", "first", "means"),
    [("azure-conv", 3118, (958, 89), (1153, 246)), ("azure-code", 2146, (1266, 13), (1972, 28))],
)
def test_bundled_traces(name, rows, first, means):
    table = bundled(name)
    span = np.ptp(table.arrival)
    assert len(table) == rows and table.name == name
    assert (table.prompt[0], table.output[0]) == first
    assert (round(table.prompt.mean()), round(table.output.mean())) == means
    assert table.arrival[0] == 0 and 590 < span < 600
    # The description shown to users quotes these numbers.
    assert f"{rows:,} requests, {rows / span:.1f} per second" in BUNDLED[name]
    assert f"mean {means[0]:,} in and {means[1]} out" in BUNDLED[name]


def test_bundled_lengths():
    table = bundled("sharegpt-8k")
    assert len(table) == 30_731 and not table.arrival.any()
    assert (round(table.prompt.mean()), round(table.output.mean())) == (2340, 439)
    assert np.quantile(table.prompt, (0.5, 0.9, 0.99)).round().tolist() == [1730, 5696, 7434]
    assert np.quantile(table.output, (0.5, 0.9, 0.99)).round().tolist() == [415, 834, 998]
    assert "30,731 requests, mean 2,340 in and 439 out" in BUNDLED["sharegpt-8k"]


def test_unknown_bundled_trace():
    with pytest.raises(InputError, match="unknown bundled trace 'azure'; did you mean 'azure-co"):
        bundled("azure")
