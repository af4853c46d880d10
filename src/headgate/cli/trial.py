"""`headgate trial`: a switchback experiment on a live server."""

from __future__ import annotations

import asyncio
import re
import secrets
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from pydantic import create_model

from headgate.cli import output
from headgate.cli.flags import takes_settings
from headgate.cli.help import Text, Texts, panelled
from headgate.core.errors import InputError, RunError, RunInterruptedError
from headgate.experiment.settings import Experiment, experiment
from headgate.settings_base import BETWEEN, SettingsModel, checked, promised
from headgate.stats.switchback import KEPT, METRICS, SHORTEST_BLOCK, THROUGHPUT, too_short

if TYPE_CHECKING:
    from headgate.core.request import Slo
    from headgate.live.trial.load import FollowedTrace
    from headgate.live.trial.trial import Outcome, TrialPlan
    from headgate.workloads.workload import Workload

FLOOR = re.compile(r"kept\s*<\s*(\d{1,3}(?:\.\d+)?)\s*%")
LONG_ENOUGH = 20_000  # requests that are drawn where no trace is given; then they begin again
LOAD = (
    "rate", "clients", "arrivals", "burstiness", "workload", "prompt", "output", "prompt_law", "output_law",
    "shape", "sigma", "spread", "shared_prefix", "cap_prompt", "cap_output", "requests", "trace", "format",
    "columns", "times", "slice", "scale_rate", "skip_bad_rows", "ttft", *BETWEEN,
)  # fmt: skip
SENDS = ("rate", "clients", "trace")  # one of these makes the trial send requests of its own
PROMISES = ("ttft", *BETWEEN)
# The same settings as those of `headgate simulate`, declared there.
TrialLoad: Any = create_model(
    "TrialLoad",
    __base__=SettingsModel,
    **{name: (Experiment.model_fields[name].annotation, Experiment.model_fields[name]) for name in LOAD},  # type: ignore[call-overload]
)


_option = partial(panelled, panel="Trial")


@takes_settings
def trial(
    load: Annotated[dict[str, Any], TrialLoad],
    arm: Annotated[Texts, _option("POLICY, a settings file, or NAME=URL of a server; repeat it")] = None,
    config: Annotated[Text, _option("settings file of the server, as HEADGATE_CONFIG names it")] = None,
    url: Annotated[Text, _option("the server, where the trial sends requests")] = None,
    api_key: Annotated[str, _option("key that the server wants", envvar="VLLM_API_KEY")] = "",
    follow: Annotated[
        Text, _option("step trace of the server (default: `trace` of its settings, else a new one)")
    ] = None,
    minutes: Annotated[
        float, _option("planned length after the first minute; 0: until the answer is clear")
    ] = 30.0,
    block: Annotated[Text, _option("length of a block (default: from the traffic, 30s to 2min)")] = None,
    stop_if: Annotated[Text, _option("back to the baseline when so few are kept, such as 'kept<90%'")] = None,
    primary: Annotated[
        Text, _option("the figure that decides: kept, ttft, ttft-p95, tpot, gap-p99, throughput")
    ] = None,
    whole: Annotated[
        bool, _option("run to the planned end, even when the answer is clear before", flag="--whole")
    ] = False,
    seed: Annotated[int, _option("of the order of arms, and of the requests sent")] = 0,
    speed: Annotated[float, _option("of a faster `headgate emulate`; 1 for real servers")] = 1.0,
    out: Annotated[Text, typer.Option(help="folder for the results (default: the next under runs/)")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="write into a folder that is not empty")
    ] = False,
    report: output.Report = None,
    json: output.Json = None,
) -> None:
    """Compare policies on a running server, by turns.

    A round holds every arm once, in random order, each for half a minute or longer. Arms are put into force
    through the server's settings file, which its plug-in reads again; in the end, on Ctrl-C and when the
    trial is killed, the file is put back as it was. Figures are of your own traffic, from the step trace of
    the server, or of requests that the trial sends (--rate, --trace, --clients). With one --arm the baseline
    is what the file says now; with several it is the first.

    Examples:
      headgate trial --config headgate.toml --arm vllm --arm auto  # your own traffic
      headgate trial --config headgate.toml --url http://localhost:8000 --arm auto --trace azure-conv
          --rate 16
      headgate trial --config headgate.toml --arm auto --arm mixed --stop-if 'kept<90%'
      headgate trial --arm old=http://a:8000 --arm new=http://b:8000 --rate 8
    """
    from headgate.live.trial.arms import base_settings, read_arms
    from headgate.live.trial.load import FollowedTrace
    from headgate.live.trial.trial import TrialPlan

    checked(TrialLoad, load)
    load = TrialLoad.renamed(load)
    _check(minutes, speed, seed, url)
    promises = {name: str(load[name]) for name in PROMISES if name in load}
    arms = read_arms(arm or [], config, promises if config else {})
    names = {metric.name: metric for metric in METRICS}
    if primary is not None and primary not in names:
        raise InputError(f"--primary {primary} is unknown; one of {', '.join(names)}")
    floor = FLOOR.fullmatch((stop_if or "").strip())
    if stop_if is not None and (not floor or not 0 < float(floor[1]) <= 100):
        raise InputError(f"--stop-if {stop_if!r} is not understood; write it as 'kept<90%'")
    seconds = _block(block, minutes, len(arms))
    parsed = seconds, names[primary] if primary else None, float(floor[1]) / 100 if floor else None
    plan = TrialPlan(arms, minutes or None, seed, *parsed, whole, speed=speed)
    settings = base_settings(config, promises)
    judged = _judged(settings)
    promises_any = any(slo[:2] != (None, None) for slo in judged.values())
    if not promises_any and (stop_if or primary == KEPT.name):
        flag = "--stop-if" if stop_if else "--primary kept"
        raise InputError(f"{flag} is about promises, and none is made; give --ttft, --tbt or both")
    sends = [name for name in SENDS if name in load]
    if arms[0].url and not sends:
        raise InputError("two servers get requests from the trial; say which, such as --rate 10")
    if not sends:
        _refuse_idle(load, url)
    workload = _workload(load, seed) if sends else None
    if workload is not None and workload.closed and plan.primary is None and not promises_any:
        plan = replace(plan, primary=THROUGHPUT)  # clients that wait for answers saturate a server
    with output.run_folder(out, "trial", overwrite) as folder:
        source = follow or settings.trace
        own = not sends and source is None
        if own:  # the server writes one for the time of the trial
            source = str((folder / f"trace-{secrets.token_hex(3)}.jsonl").resolve())
            arms = tuple(replace(arm, words={**arm.words, "trace": source}) for arm in arms)
            plan = replace(plan, arms=arms)
        followed = None if sends else FollowedTrace(source or "", own)
        say = output.said_to(json)
        sent = Sent(plan, url, api_key, workload, judged)
        outcome = asyncio.run(_run(sent, config, followed, say))
        traffic = f"that the server has, from {source}" if followed else "requests that the trial sends"
        told = (api_key, f"--api-key={api_key}") if api_key else ()  # which no report should
        command = [word[: -len(api_key)] + "KEY" if word in told else word for word in sys.argv[1:]]
        _write(outcome, sent, folder, output.Outputs(json, report), traffic, command)
    if outcome.interrupted:
        raise RunInterruptedError(f"{outcome.stopped}; what there is stands in {folder}")
    if outcome.guarded:
        raise RunError(f"{outcome.stopped}; what there is stands in {folder}")


# -- what was asked for


def _refuse_idle(load: dict[str, Any], url: str | None) -> None:
    idle = [name.replace("_", "-") for name in load if name not in PROMISES]
    if idle:
        raise InputError(f"--{idle[0]} is about requests that the trial sends; add --rate or drop it")
    if url is not None:
        raise InputError(
            "--url is where the trial sends requests; add --rate or --trace, or drop it to see your own"
        )


def _check(minutes: float, speed: float, seed: int, url: str | None) -> None:
    if not 0 <= minutes <= 7 * 24 * 60:
        raise InputError(f"--minutes {minutes:g}; give 0 (until the answer is clear) to 10080")
    if not 0 < speed <= 1000:
        raise InputError(f"--speed {speed:g}; give a number above 0, as headgate emulate has it")
    if seed < 0:
        raise InputError(f"--seed {seed}; give 0 or more")
    if url is not None and not re.fullmatch(r"https?://[^\s/]+\S*", url):
        raise InputError(f"--url {url!r} is no URL; write it as http://HOST:PORT")


def _block(text: str | None, minutes: float, arms: int) -> float | None:
    from headgate.core.durations import duration

    seconds = duration(text) if text is not None else None
    if seconds is not None and not 10 <= seconds <= 120:
        raise InputError(f"--block {text}; give 10s to 2min, or leave it out to let the traffic say")
    if minutes and (fault := too_short(minutes, arms, seconds or SHORTEST_BLOCK)):
        raise InputError(fault)
    return seconds


def _judged(settings: Any) -> dict[str | None, Slo]:
    from headgate.core.request import Slo

    whole = settings.model_copy(update={"delivery": 0.0})  # as clients see them
    judged: dict[str | None, Slo] = {}
    for name, own in settings.classes.items():
        judged[name] = Slo() if own.background else whole.promise(own)
    if (common := promised(settings)) != Slo():
        judged[None] = common
    return judged


def _workload(load: dict[str, Any], seed: int) -> Workload:
    from headgate.experiment.build import make_workload

    words = {**load, "seed": seed}
    if "trace" not in load:
        words.setdefault("requests", LONG_ENOUGH)
    workload, bad = make_workload(experiment(words))
    if bad.count:
        line, reason = bad.first[0]
        print(f"left out {bad.count} bad rows; the first, line {line}: {reason}", file=sys.stderr)
    if not workload.closed and float(workload.arrival[-1]) <= 0:
        raise InputError("all requests come at once, so blocks have no load of their own; give --rate")
    return workload


# -- the trial


class Sent(NamedTuple):
    plan: TrialPlan
    url: str | None
    key: str
    workload: Workload | None  # None: the traffic that the server has
    judged: dict[str | None, Slo]


async def _run(sent: Sent, config: str | None, followed: FollowedTrace | None, say: Any) -> Outcome:
    from headgate.live.trial.arms import SettingsFile
    from headgate.live.trial.trial import BySettings, ByUrl, Trial

    tell = partial(print, "headgate trial:", file=say, flush=True)
    file, plan = SettingsFile(config) if config else None, sent.plan
    source: Any = followed
    metrics: Any = None
    if sent.workload is not None:
        source, metrics = await _own_load(sent, sent.workload)
    switch = ByUrl(source) if file is None else BySettings(file, source, metrics, plan.speed)
    if file is not None:
        file.take()
    try:
        names = " and ".join(plan.names)
        tell(f"{names}, baseline {plan.names[0]}; Ctrl-C ends it and puts the settings back")
        return await Trial(plan, source, switch, tell).run()
    finally:
        switch.restore()


async def _own_load(sent: Sent, workload: Workload) -> tuple[Any, Any]:
    from headgate.live.trial import load

    plan, url, key = sent[:3]
    urls = [arm.url for arm in plan.arms if arm.url] or ([url.rstrip("/")] if url else [])
    if not urls:
        raise InputError("--rate, --clients and --trace send requests; say where, --url http://HOST:PORT")
    if url and plan.arms[0].url:
        raise InputError("the arms are URLs already; drop --url")
    models = [(await load.served_model(each, key))[0] for each in urls]
    metrics = None if plan.arms[0].url else load.PlugInMetrics(urls[0], key)
    if metrics is not None:
        await metrics.require()
    source = load.TraceLoad(workload, urls[0], sent.judged, plan.seed, plan.speed, key)
    source.model = models[0]
    if len(set(models)) > 1:
        raise InputError(f"the servers serve {models[0]} and {models[1]}; compare one model")
    return source, metrics


def _write(
    outcome: Outcome, sent: Sent, folder: Path, to: output.Outputs, traffic: str, command: list[str]
) -> None:
    from headgate.live.trial.book import as_json, bench_result
    from headgate.report.runs.trial import trial_page
    from headgate.report.terminal import show

    plan, workload = sent.plan, sent.workload
    date = datetime.now(UTC).isoformat(timespec="seconds")
    document: dict[str, Any] = {"date": date, "stopped": outcome.stopped, "seed": plan.seed}
    document["settings"] = {arm.name: arm.url or dict(arm.words) for arm in plan.arms}
    document |= as_json(outcome.findings)
    output.write_json(str(folder / "trial.json"), document)
    rate = None
    if workload is not None and not workload.closed:
        rate = len(workload) / float(workload.arrival[-1])
    for place, name in enumerate(plan.names):
        file = folder / f"{place}-{re.sub(r'[^A-Za-z0-9_.+-]+', '-', name)}.bench.json"
        result = bench_result(outcome.book, place, name, outcome.model, date, rate)
        output.write_json(str(file), result)
    known = {"date": date, "model": outcome.model, "traffic": traffic}
    about = {name: value for name, value in known.items() if value}
    page = trial_page(outcome, plan.arms, sent.judged, about, command)
    output.save_page(page, to.report or str(folder / output.REPORT), output.said_to(to.json))
    output.write_json(to.json, document)
    if to.json != "-":
        show(page)
        print(f"results: {folder}")
