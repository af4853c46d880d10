"""llm-d's latency predictor from a cost card, by `methods/latency.py`: its calls and fields, no training."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
import numpy as np
from aiohttp import web

from headgate.core.errors import unknown
from headgate.cost.card import load_card
from headgate.live.emulate.api import ProblemError, as_json, busy, detail, read_bytes
from headgate.live.emulate.options import PredictOptions
from headgate.live.emulate.server import Listening, errors_as
from headgate.live.tasks import Handler, says, until_stopped
from headgate.methods.latency import (
    KINDS,
    Correction,
    EngineStates,
    Floats,
    LatencyModel,
    Traffic,
    features_of,
)
from headgate.settings_base import checked
from headgate.sim.engine.engine import engine_of_card

MODEL_TYPE = "lightgbm"  # of the names that llm-d's client knows the one for which it asks for no trees
MOST_ROWS = 10_000
MOST = 10**9  # requests or tokens of one row
MOST_MS = 1e8
MOST_CALLS = 64  # at once; beyond, 503
MOST_CONNECTIONS = 2048
REMEMBERED = 2000.0  # rows after which a prompt weighs 1/e in the mean prompt

Whole = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_MS)]
Label = Annotated[str, msgspec.Meta(max_length=256)]


class Row(msgspec.Struct):
    """An engine and a request, as llm-d's router describes them. `num_request_running` counts all there."""

    kv_cache_percentage: Share
    input_token_length: Whole
    num_request_waiting: Whole
    num_request_running: Whole
    num_tokens_generated: Whole
    prefix_cache_score: Share
    prefill_tokens_in_flight: Whole = 0
    decode_tokens_in_flight: Whole = 0
    encoder_input_size: Whole = 0
    encoder_matched_size: Whole = 0
    pod_type: Label | None = ""

    def __post_init__(self) -> None:
        if self.encoder_matched_size > self.encoder_input_size:
            raise ValueError("encoder_matched_size is above encoder_input_size")


class ObservedRow(Row, kw_only=True):
    """The same with what was measured; 0: it was not."""

    actual_ttft_ms: Milliseconds
    actual_tpot_ms: Milliseconds


Rows = Annotated[list[Row], msgspec.Meta(min_length=1, max_length=MOST_ROWS)]
RawRows = Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1, max_length=MOST_ROWS)]
ObservedRows = Annotated[list[ObservedRow], msgspec.Meta(min_length=1, max_length=MOST_ROWS)]
StrictBulk = msgspec.defstruct("StrictBulk", [("requests", Rows)])
LenientBulk = msgspec.defstruct("LenientBulk", [("requests", RawRows)])  # rows are read one by one
Observations = msgspec.defstruct("Observations", [("entries", ObservedRows)])


Prediction = dict[str, float | str]


class Predictor:
    def __init__(self, options: PredictOptions) -> None:
        if options.policy not in KINDS:
            raise unknown("policy of a prediction", options.policy, KINDS)
        card = load_card(options.card)
        engine = engine_of_card(card, options.slots, options.budget, options.kv_tokens)
        ahead = card.host is not None if options.asynchronous is None else options.asynchronous
        self.model = LatencyModel(
            cost=engine.cost.unhosted() if ahead and card.host else engine.cost,
            slots=engine.running,
            budget=engine.batch_tokens,
            kv_tokens=engine.kv_tokens,
            kind=KINDS[options.policy],
            gap=options.tbt,
            ahead=ahead,
            host=card.host if ahead else None,
        )
        self.card, self._streaming, self._output = card, options.streaming, options.output
        self._prompt = options.prompt
        self._counts_ahead = False  # has any row told of prompt tokens in flight?
        self.corrections = {"ttft": Correction(), "tpot": Correction()}
        self.started = _now()

    def predict(self, rows: Sequence[Row]) -> tuple[Floats, Floats]:
        states = self._states(rows)
        computed = np.minimum(states.prompt * (1 - states.cached), self.card.max_model_len)[states.cached < 1]
        if len(computed):
            kept = float(np.exp(-len(computed) / REMEMBERED))
            self._prompt = max(kept * self._prompt + (1 - kept) * float(computed.mean()), 1.0)
        ttft, tpot = self._by_card(states)
        features = features_of(states, self.model.slots, self.model.budget)
        ttft = ttft * self.corrections["ttft"].factors(features)
        return 1e3 * ttft, 1e3 * tpot * self.corrections["tpot"].factors(features)

    def observe(self, rows: Sequence[ObservedRow]) -> None:
        states = self._states(rows)
        predicted = dict(zip(("ttft", "tpot"), self._by_card(states), strict=True))
        features = features_of(states, self.model.slots, self.model.budget)
        for name, correction in self.corrections.items():
            measured = np.array([getattr(row, f"actual_{name}_ms") for row in rows]) / 1e3
            some = measured > 0
            correction.learn(features[some], predicted[name][some], measured[some])

    def _by_card(self, states: EngineStates) -> tuple[Floats, Floats]:
        ttft, tpot = self.model.predict(states, Traffic(self._prompt, self._output))
        return (ttft if self._streaming else ttft + self._output * tpot), tpot

    def _states(self, rows: Sequence[Row]) -> EngineStates:
        """A prefill engine has prompts only; of a request on a decode engine the prompt is there already."""
        columns = np.array([msgspec.structs.astuple(row)[:7] for row in rows], dtype=np.float64)
        kv, prompt, waiting, present, _, cached, ahead = columns.T
        self._counts_ahead |= bool(ahead.any())
        ahead = ahead if self._counts_ahead else np.full_like(ahead, -1.0)
        prefills = np.array([row.pod_type == "prefill" for row in rows])
        decodes = np.array([row.pod_type == "decode" for row in rows])
        running = np.maximum(present - waiting, 0.0)
        ahead = np.where(prefills, np.maximum(ahead, (running + waiting) * self._prompt), ahead)
        return EngineStates(
            running=running,
            waiting=waiting,
            kv=kv,
            prompt=prompt,
            cached=np.where(decodes, 1.0, cached),
            ahead=np.where(decodes, 0.0, ahead),
        )

    def status(self) -> dict[str, Any]:
        return {
            "is_ready": True,
            **NAMES,
            "last_model_load": self.started,
            "training_server_url": "",
            "models_exist": EXIST,
            "card": self.card.name,
            "observed": {
                name: {"rows": each.seen, "mean_relative_error": each.error}
                for name, each in self.corrections.items()
            },
        }


NAMES: Prediction = {"model_type": MODEL_TYPE, "objective_type": "mean", "quantile": 0.5}
EXIST = {"ttft_model": True, "tpot_model": True}
UNREADABLE = (msgspec.DecodeError, RecursionError, ValueError)


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class PredictServer:
    def __init__(self, predictor: Predictor, body_limit: int) -> None:
        self._predictor, self._calls = predictor, 0
        errors = errors_as(lambda problem: detail(problem.status, problem.message), "predictor")
        self.app = web.Application(middlewares=[self._limit, errors], client_max_size=body_limit)
        for path, handler in {
            "/predict": self._predict,
            "/predict/bulk": self._predict_each,
            "/predict/bulk/strict": self._predict_all,
            "/add_training_data_bulk": self._learn,
        }.items():
            self.app.router.add_post(path, handler)
        for path, about in {
            "/status": predictor.status,
            "/readyz": lambda: {"status": "ready", **NAMES},
            "/healthz": lambda: {"status": "ok", **NAMES},
            "/model/download/info": lambda: {**NAMES, "model_status": EXIST},
        }.items():
            self.app.router.add_get(path, says(about, as_json))

    async def _predict(self, request: web.Request) -> web.Response:
        return as_json(self._answers([await _read(request, Row)])[0])

    async def _predict_all(self, request: web.Request) -> web.Response:
        begun = time.perf_counter()
        made = self._answers((await _read(request, StrictBulk)).requests)
        return as_json(_bulk(made, 0, begun))

    async def _predict_each(self, request: web.Request) -> web.Response:
        begun = time.perf_counter()
        rows: dict[int, Row] = {}
        errors: list[dict[str, Any]] = []
        for index, raw in enumerate((await _read(request, LenientBulk)).requests):
            try:
                rows[index] = msgspec.json.decode(raw, type=Row)
            except UNREADABLE as error:
                errors.append({"index": index, "error": str(error)[:300], "request": {}})
        made: list[Prediction | None] = [None] * (len(rows) + len(errors))
        if rows:
            for index, one in zip(rows, self._answers(list(rows.values())), strict=True):
                made[index] = one
        return as_json(_bulk(made, len(errors), begun) | {"errors": errors})

    async def _learn(self, request: web.Request) -> web.Response:
        entries = (await _read(request, Observations)).entries
        self._predictor.observe(entries)
        return as_json({"message": f"Accepted {len(entries)} training samples."}, 202)

    def _answers(self, rows: Sequence[Row]) -> list[Prediction]:
        about = {"predicted_at": _now(), "last_model_load": self._predictor.started, **NAMES}
        ttft, tpot = self._predictor.predict(rows)
        pairs = zip(ttft.tolist(), tpot.tolist(), strict=True)
        return [{"ttft_ms": first, "tpot_ms": rest, **about} for first, rest in pairs]

    @web.middleware
    async def _limit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._calls >= MOST_CALLS and request.method == "POST":
            return busy().response()
        self._calls += 1
        try:
            return await handler(request)
        finally:
            self._calls -= 1


async def _read(request: web.Request, kind: Any) -> Any:
    try:
        return msgspec.json.decode(await read_bytes(request, lambda more: None), type=kind)
    except UNREADABLE as error:
        raise ProblemError(str(error)[:300], 422) from None


def _bulk(made: Sequence[Prediction | None], failed: int, begun: float) -> dict[str, Any]:
    return {
        "predictions": made,
        "total_requests": len(made),
        "successful_predictions": len(made) - failed,
        "failed_predictions": failed,
        "processing_time_ms": 1e3 * (time.perf_counter() - begun),
    }


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int) -> AsyncIterator[str]:
    listener = Listening(app, MOST_CONNECTIONS, "choose another", shutdown_timeout=1.0)
    try:
        await listener.start(host, port)
        yield listener.url
    finally:
        await listener.stop()


@asynccontextmanager
async def predicting(options: PredictOptions | None = None, **words: Any) -> AsyncIterator[str]:
    options = options or checked(PredictOptions, {"port": 0} | words)
    server = PredictServer(Predictor(options), options.body_limit)
    async with listening(server.app, options.host, options.port) as url:
        yield url


def run(options: PredictOptions, say: Callable[[str], None]) -> None:
    async def serve() -> None:
        async with predicting(options) as url:
            say(f"{url}  {load_card(options.card).name}, {options.policy}")
            await until_stopped()

    asyncio.run(serve())
