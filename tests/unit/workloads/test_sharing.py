"""What requests share: readers of traces, tables of pieces, drawn conversations."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headgate.core.errors import InputError
from headgate.workloads.arrivals import arrival_process
from headgate.workloads.lengths import length_law
from headgate.workloads.sessions import SharedPrefix, as_sessions, found_again, shared_prefix
from headgate.workloads.synthetic import generate
from headgate.workloads.traces import read_trace
from headgate.workloads.workload import Contents, Workload


def mooncake(tmp_path, *rows):
    file = tmp_path / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    return file


def test_mooncake_ids_that_always_occur_together_are_one_piece(tmp_path):
    file = mooncake(tmp_path, (0, 1500, 5, [1, 2, 3]), (10, 1100, 5, [1, 2, 4]), (20, 100, 5, [9]))
    found = read_trace(file)[0].contents
    assert found.rows() == [
        [(0, 1024), (1, 476), (-1, 0)],
        [(0, 1024), (2, 76), (-1, 0)],
        [(3, 100), (-1, 0)],
    ]
    assert found.pieces()[1][-1] == (-2, 0)  # its output is its own


def test_a_trace_without_ids_shares_nothing(tmp_path):
    assert read_trace(mooncake(tmp_path, (0, 1500, 5, [])))[0].contents is None


def test_ids_that_are_none_are_refused(tmp_path):
    with pytest.raises(InputError, match=r":1: hash_ids is not a list of ids; fix the row"):
        read_trace(mooncake(tmp_path, (0, 1500, 5, [[1]])))


def test_qwen_outputs_have_the_ids_of_the_next_turn(tmp_path):
    names = ("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")
    values = [(1, -1, 0, 40, 20, [1, 2, 3]), (2, 1, 9, 70, 5, [1, 2, 7, 8, 9])]
    rows = [dict(zip(names, row, strict=True)) for row in values]
    file = tmp_path / "qwen.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    workload = read_trace(file)[0]
    assert workload.contents.rows()[0] == [(0, 60), (-1, 0)]
    assert found_again(workload, 16).tolist() == [0, 48]


def test_prefix_and_session_columns(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens,prefix,prefix_tokens,session\n"
        "0,100,10,help,64,a\n1,100,10,help,64,b\n2,200,10,help,64,a\n3,50,10,,,\n"
    )
    workload = read_trace(file)[0]
    assert workload.contents.rows() == [
        [(0, 64), (1, 36)], [(0, 64), (2, 36)], [(0, 64), (1, 136)], [(-1, 50)],
    ]  # fmt: skip
    assert found_again(workload, 16).tolist() == [0, 64, 96, 0]


def test_a_prefix_needs_its_tokens(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("arrived_at,num_prefill_tokens,num_decode_tokens,prefix\n0,100,10,help\n")
    with pytest.raises(InputError, match="prefix_tokens is missing"):
        read_trace(file)


def small():
    rows = [[(1, 10), (2, 5)], [(1, 10), (-1, 3)], [(-1, 7)]]
    return Workload.of([15, 13, 7], [1, 1, 1], arrival=[0.0, 1.0, 2.0], contents=Contents.of(rows))


def test_contents_follow_the_rows():
    workload = small()
    assert workload.subset(np.array([False, True, True])).contents.rows() == [[(1, 10), (-1, 3)], [(-1, 7)]]
    assert workload.cap(prompt=12).contents.rows()[0] == [(1, 10), (2, 2), (-1, 0)]
    assert workload.cap(prompt=10).contents.rows()[0] == [(1, 10), (-1, 0)]
    merged = workload.merge(Workload.of([4], [1], arrival=[0.5]), small())
    assert merged.contents.rows()[:3] == [[(1, 10), (2, 5)], [(4, 10), (5, 5)], [(-1, 4)]]
    assert workload == small()
    assert workload != Workload.of([15, 13, 7], [1, 1, 1], arrival=[0.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[(1, 14)], [(1, 13)], [(1, 7)]], "row 0 has 14 tokens, its prompt 15"),
        ([[(1, 15)], [(1, 13)]], "2 rows, prompt has 3"),
        ([[(1, 15)], [(-2, 13)], [(1, 7)]], "a key below -1"),
        ([[(1, 15)], [], [(1, 7)]], "row 1 has no piece"),
    ],
)
def test_contents_that_do_not_fit_are_refused(rows, message):
    with pytest.raises(InputError, match=message):
        Workload.of([15, 13, 7], [1, 1, 1], contents=Contents.of(rows))


def drawn(requests=400, rate=4.0):
    laws = {"prompt": length_law("fixed", 30), "output": length_law("fixed", 20)}
    return generate(requests, arrivals=arrival_process("poisson", rate), **laws)


def test_turns_repeat_what_was_said():
    workload = as_sessions(drawn(), turns=4, think=10.0, prefixes=[SharedPrefix(64, 3)])
    rows = workload.contents.rows()
    assert {row[0][0] for row in rows} == {0, 1, 2} and all(row[0][1] == 64 for row in rows)
    talks: dict[int, list[int]] = {}
    for row in rows:
        talks.setdefault(row[1][0], []).append(row[1][1])
    assert all(said == [30 + 50 * turn for turn in range(len(said))] for said in talks.values())
    assert 3 < len(rows) / len(talks) < 5
    assert (np.diff(workload.arrival) >= 0).all()
    assert as_sessions(drawn(), turns=4, think=10.0, prefixes=[SharedPrefix(64, 3)]) == workload


def test_system_prompts_alone_keep_arrivals():
    plain = drawn()
    workload = as_sessions(plain, prefixes=[SharedPrefix(64)])
    assert (workload.arrival == plain.arrival).all() and (workload.prompt == 94).all()
    assert found_again(workload, 16).tolist() == [0] + [64] * 399


@pytest.mark.parametrize("text", ["", "x", "0", "5:0", "5:-1", "5:2:3"])
def test_a_shared_prefix_must_make_sense(text):
    with pytest.raises(InputError, match="TOKENS:COUNT"):
        shared_prefix(text)


def test_conversations_need_times():
    with pytest.raises(InputError, match="--turns needs arrival times"):
        as_sessions(drawn().as_closed(4), turns=3)
