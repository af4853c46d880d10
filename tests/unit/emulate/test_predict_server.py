"""The contract of llm-d's Go client (`latencypredictorclient/types.go`), and input that breaks it."""

import asyncio
import io
import json
from datetime import datetime

import aiohttp
import pytest

from headgate.core.errors import InputError
from headgate.live.emulate.options import PredictOptions
from headgate.live.predict import MOST_ROWS, Predictor, predicting
from headgate.settings_base import checked

ROW = {
    "kv_cache_percentage": 0.3,
    "input_token_length": 1000,
    "num_request_waiting": 2,
    "num_request_running": 40,
    "num_tokens_generated": 1,
    "prefix_cache_score": 0.25,
    "encoder_input_size": 0,
    "encoder_matched_size": 0,
    "prefill_tokens_in_flight": 3000,
    "decode_tokens_in_flight": 0,
}
OBSERVED = ROW | {"actual_ttft_ms": 200.0, "actual_tpot_ms": 0.0, "timestamp": "2026-11-18T10:00:00.5Z"}


def served(calls, **words):
    """What a running predictor answers to `calls`, a coroutine that gets `ask(method, path, body)`."""

    async def go():
        async with predicting(**words) as url, aiohttp.ClientSession(url) as session:

            async def ask(method, path, body=None, data=None):
                data = json.dumps(body).encode() if data is None and body is not None else data
                data = None if data is None else io.BytesIO(data)
                headers = {"Content-Type": "application/json"}
                async with session.request(method, path, data=data, headers=headers) as answer:
                    return answer.status, await answer.json()

            return await calls(ask)

    return asyncio.run(go())


def test_one_row_is_answered_with_every_field_the_client_reads():
    async def calls(ask):
        return await ask("POST", "/predict", ROW)

    status, answer = served(calls)
    assert status == 200
    assert 0 < answer["tpot_ms"] < answer["ttft_ms"] < 10_000
    assert answer["model_type"] == "lightgbm"  # with another name the client reports that it is not ready
    assert (answer["objective_type"], answer["quantile"]) == ("mean", 0.5)
    for name in ("predicted_at", "last_model_load"):  # Go reads RFC 3339 with a zone
        assert datetime.fromisoformat(answer[name]).tzinfo is not None


def test_a_strict_bulk_keeps_the_order_and_refuses_all_for_one_bad_row():
    rows = [ROW | {"input_token_length": length} for length in (8000, 10, 4000)]

    async def calls(ask):
        good = await ask("POST", "/predict/bulk/strict", {"requests": rows})
        bad = [*rows, ROW | {"kv_cache_percentage": 1.5}]
        return good, await ask("POST", "/predict/bulk/strict", {"requests": bad})

    (status, answer), (refused, why) = served(calls)
    first, second, third = (each["ttft_ms"] for each in answer["predictions"])
    assert (status, refused) == (200, 422)
    assert second < third < first
    assert (answer["total_requests"], answer["successful_predictions"]) == (3, 3)
    assert answer["failed_predictions"] == 0
    assert answer["processing_time_ms"] > 0
    assert "kv_cache_percentage" in why["detail"]


def test_a_lenient_bulk_says_which_rows_failed_in_types_the_client_can_read():
    rows = [ROW, ROW | {"num_request_running": -1, "pod_type": 7, "input_token_length": "x"}, "no row", ROW]

    async def calls(ask):
        return await ask("POST", "/predict/bulk", {"requests": rows})

    status, answer = served(calls)
    assert status == 200
    assert [each is None for each in answer["predictions"]] == [False, True, True, False]
    assert (answer["successful_predictions"], answer["failed_predictions"]) == (2, 2)
    assert [each["index"] for each in answer["errors"]] == [1, 2]
    assert all(each["error"] for each in answer["errors"])
    assert answer["errors"][0]["request"] == {}  # an echo of wrong types would break the client's decoder


def test_status_readiness_and_model_info_are_what_the_client_wants():
    async def calls(ask):
        paths = ("/status", "/readyz", "/healthz", "/model/download/info")
        return [await ask("GET", path) for path in paths]

    answers = served(calls)
    assert [status for status, _ in answers] == [200] * 4
    status, ready, health, model = (body for _, body in answers)
    assert status["is_ready"] and all(status["models_exist"].values())
    assert status["training_server_url"] == ""
    assert all(each["model_type"] == "lightgbm" for each in (status, ready, health, model))
    assert (ready["status"], health["status"]) == ("ready", "ok")
    assert model["model_status"] == {"ttft_model": True, "tpot_model": True}


def test_what_was_measured_corrects_what_is_predicted():
    """An engine twice as slow as its card: after two hundred rows predictions are right to a tenth."""

    async def calls(ask):
        _, before = await ask("POST", "/predict", ROW)
        slow = {"actual_ttft_ms": 2 * before["ttft_ms"], "actual_tpot_ms": 0.0}
        slow_decodes = {"actual_ttft_ms": 0.0, "actual_tpot_ms": 1.5 * before["tpot_ms"]}
        for _ in range(20):
            entries = [OBSERVED | slow] * 5 + [OBSERVED | slow_decodes] * 5
            status, answer = await ask("POST", "/add_training_data_bulk", {"entries": entries})
        _, after = await ask("POST", "/predict", ROW)
        return before, status, answer, after, (await ask("GET", "/status"))[1]

    before, status, answer, after, told = served(calls)
    assert (status, answer["message"]) == (202, "Accepted 10 training samples.")
    assert after["ttft_ms"] == pytest.approx(2 * before["ttft_ms"], rel=0.1)
    assert after["tpot_ms"] == pytest.approx(1.5 * before["tpot_ms"], rel=0.1)
    assert told["observed"]["ttft"]["rows"] == 100
    assert told["observed"]["ttft"]["mean_relative_error"] < 0.5


@pytest.mark.parametrize(
    "path", ["/predict", "/predict/bulk", "/predict/bulk/strict", "/add_training_data_bulk"]
)
def test_bad_input_gets_422_and_harms_nothing(path):
    rows = [
        b"", b"{", b"[]", b"null", b'{"requests": []}', b'{"entries": []}', b'{"requests": 5}', b"\xff\xfe",
        b"[" * 5000, json.dumps({"requests": [ROW] * (MOST_ROWS + 1)}).encode(),
        json.dumps({"entries": [OBSERVED] * (MOST_ROWS + 1)}).encode(),
        b'{"kv_cache_percentage": NaN}', b'{"kv_cache_percentage": 1e999}',
    ]  # fmt: skip
    changes = [
        {"kv_cache_percentage": -0.1}, {"prefix_cache_score": 2}, {"input_token_length": 10**12},
        {"num_request_waiting": True}, {"num_request_running": "4"}, {"encoder_matched_size": 3},
        {"input_token_length": 1.5}, {"actual_ttft_ms": -1}, {"actual_tpot_ms": 1e30},
    ]  # fmt: skip
    if path == "/add_training_data_bulk":
        rows += [json.dumps({"entries": [OBSERVED | change]}).encode() for change in changes]
    elif path != "/predict/bulk":
        one = [ROW | change for change in changes[:7]]
        rows += [json.dumps(row if path == "/predict" else {"requests": [row]}).encode() for row in one]

    async def calls(ask):
        before = await ask("POST", "/predict", ROW)
        statuses = [(await ask("POST", path, data=data))[0] for data in rows]
        return before, statuses, await ask("POST", "/predict", ROW)

    (_, before), statuses, (status, after) = served(calls)
    assert set(statuses) == {422}
    assert status == 200
    assert (after["ttft_ms"], after["tpot_ms"]) == pytest.approx(
        (before["ttft_ms"], before["tpot_ms"]), rel=0.01
    )


def test_extreme_rows_are_answered_with_finite_numbers():
    most = {"num_request_waiting": 10**9, "num_request_running": 10**9, "input_token_length": 10**9}
    rows = [
        ROW | most, ROW | most | {"prefill_tokens_in_flight": 10**9, "kv_cache_percentage": 1.0},
        dict.fromkeys(ROW, 0), ROW | {"prefix_cache_score": 1.0}, ROW | {"pod_type": "prefill"},
        ROW | {"pod_type": "decode"}, ROW | {"pod_type": None}, ROW | {"pod_type": "both"},
    ]  # fmt: skip

    async def calls(ask):
        return await ask("POST", "/predict/bulk/strict", {"requests": rows})

    for policy in ("mixed", "v0", "keep"):
        status, answer = served(calls, policy=policy)
        assert status == 200
        assert all(0 <= each["ttft_ms"] < 1e15 for each in answer["predictions"])
        assert all(0 < each["tpot_ms"] < 1e6 for each in answer["predictions"])


def test_bodies_methods_and_paths_are_bounded():
    async def calls(ask):
        return (
            await ask("POST", "/predict", data=b" " * 2000),
            await ask("GET", "/predict"),
            await ask("POST", "/nowhere", {}),
            await ask("POST", "/predict", ROW),
        )

    statuses = [status for status, _ in served(calls, body_limit=1000)]
    assert statuses == [413, 405, 404, 200]


def test_a_router_without_streaming_is_told_the_time_of_the_whole_answer():
    async def calls(ask):
        return (await ask("POST", "/predict", ROW))[1]

    streamed, whole = served(calls, output=100.0), served(calls, output=100.0, streaming=False)
    assert whole["ttft_ms"] == pytest.approx(streamed["ttft_ms"] + 100 * streamed["tpot_ms"])


def test_a_policy_without_a_closed_form_is_refused():
    with pytest.raises(InputError, match="choose from: keep, mixed"):
        Predictor(checked(PredictOptions, {"policy": "rad"}))
