"""`plan fluid`: how a fleet splits its engines, which requests are served, what one more engine adds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite

from headgate.advisor.fluid_plan import FluidAnswer
from headgate.methods.fluid.plan import NOTHING, FluidPlan
from headgate.report import document as doc

LEVELS = {"prefill_fairness": "prefill fairness", "decode_fairness": "decode fairness"}
LEVELS |= {"tpot": "time per token", "prefilling": "engines that prefill"}
CHANCE = "A fluid has no randomness: real fleets earn a little less."


def fluid_page(answer: FluidAnswer, command: Sequence[str]) -> doc.Page:
    plan, engines = answer.plan, answer.engines
    revenue = (
        f"Revenue: {doc.number(plan.revenue * engines)} /s, {doc.number(plan.revenue)} per engine; time per "
        f"token {1000 * plan.token_tpot:.4g} ms over tokens, {1000 * plan.tpot:.4g} ms over slots."
    )
    said = [revenue, _next(answer), _router(answer), _prices(plan), _per_second(answer)]
    pace = plan.instance.pace
    steps = (
        f"{pace.slots} slots; a step with a chunk of {pace.chunk} takes {1000 * pace.mixed_step:.4g} ms, one "
        f"without {1000 / pace.solo_speed:.4g} ms"
    )
    sections = [
        doc.Section("", (steps,)),
        doc.Section("By class, whole fleet", (_classes(answer), _held(answer))),
        doc.Section("", tuple(filter(None, (*said, *_levels(answer))))),
    ]
    about = f"{answer.costs}, {answer.demand.source}, {doc.plural(engines, 'engine')}"
    return doc.plan_page("Fluid plan", about, _split(answer), sections, answer.notes, command, CHANCE)


def _split(answer: FluidAnswer) -> str:
    plan, staffing, spare = answer.plan, answer.staffing, answer.spare
    come, served = sum(flow.rate for flow in plan.instance.flows), sum(plan.served)
    share = f"The plan serves {100 * served / come if come else 0:.0f} % of the requests."
    return (
        f"Engines: {staffing.mixed:,} take prompts and up to {plan.instance.pace.slots - 1} decodes each, "
        f"{staffing.solo:,} only decode (with spare ones for a gate that withholds: {spare.mixed:,} and "
        f"{spare.solo:,}). {share}"
    )


def _classes(answer: FluidAnswer) -> doc.Grid:
    plan, engines = answer.plan, answer.engines
    rows = []
    columns = zip(plan.instance.flows, plan.served, plan.waiting, plan.shadows.arrival, strict=True)
    for flow, served, waiting, worth in columns:
        part = 100 * served / flow.rate if flow.rate else 0.0
        queue = doc.number(waiting * engines) if isfinite(waiting) else "refused"
        rates = (flow.prompt, flow.output, flow.rate * engines, served * engines)
        cells = (doc.valued(f"{part:.1f} %", part), doc.valued(queue, waiting * engines), _zero(worth))
        rows.append(doc.row(flow.name, *rates, *cells))
    heads = ("class", "prompt\ntokens", "output\ntokens", "arrive\nper s", "served\nper s", "share")
    return doc.Grid("", (*heads, "waiting\nrequests", "one more\nis worth"), tuple(rows))


def _held(answer: FluidAnswer) -> doc.Grid:
    plan, engines = answer.plan, answer.engines
    held = zip(plan.instance.flows, plan.prefill, plan.mixed, plan.solo, strict=True)
    rows = [doc.row(flow.name, *(float(part * engines) for part in parts)) for flow, *parts in held]
    totals = (plan.prefilling, sum(plan.mixed), sum(plan.solo))
    rows.append(doc.row("all", *(float(total * engines) for total in totals)))
    heads = ("class", "engines prefilling", "decodes beside prompts", "decodes alone")
    return doc.Grid("", heads, tuple(rows))


def _next(answer: FluidAnswer) -> str:
    more, less = answer.gains
    mean, full = answer.plan.revenue, doc.number(answer.full)
    small = 1e-6 * max(1.0, mean)
    if more <= small:
        costs = "nothing" if -less <= small else f"{doc.number(-less)} /s"
        return (
            f"The next engine adds nothing: as a fluid, {full} engines serve all requests. One engine fewer "
            f"costs {costs}."
        )
    role = "take prompts" if answer.next_mixed else "only decode"
    return (
        f"The next engine adds {doc.number(more)} /s ({100 * more / mean:.0f} % of what one brings now) and "
        f"should {role}; one fewer costs {doc.number(-less)} /s. As a fluid, {full} engines serve all "
        "requests."
    )


def _router(answer: FluidAnswer) -> str:
    plan, engines = answer.plan, answer.engines
    flows = plan.instance.flows
    if plan.levels.decode_fairness is not None:
        return "Router: service-level (each decode draws its pool), with the token-bucket gate."
    if not any(plan.throttled):
        return "Router: any; no class has to be held back."
    if not plan.levels.none:
        return "Router: token-bucket; a gate that fills every free slot would break the levels."
    parts = zip(flows, plan.prefill, plan.throttled, strict=True)
    held = {flow.name: part * engines for flow, part, throttled in parts if throttled}
    few = ", ".join(name for name, part in held.items() if 0 < part < 1)
    said = f"Router: gate-and-route+ holds back {', '.join(held)}"
    if plan.prefilling >= 1 - NOTHING and few:
        return f"{said}; prefill binds and {few} need less than one engine: prefer token-bucket."
    if few:
        return f"{said}; the literal gate would over-serve {few} (below one engine)."
    return f"{said}."


def _prices(plan: FluidPlan) -> str:
    shadows, slots = plan.shadows, plan.instance.pace.slots
    prefill = shadows.prefill + slots * shadows.solo - (slots - 1) * shadows.mixed
    alone, beside, held = (doc.number(_zero(price, 1e-6)) for price in (shadows.solo, shadows.mixed, prefill))
    return (
        f"Worth per second: a decode slot alone {alone}, one beside prompts {beside}; an engine that "
        f"prefills takes {held}."
    )


def _per_second(answer: FluidAnswer) -> str:
    named = not answer.demand.source.startswith("trace")  # clusters have no names a router could know
    if not (named and len(answer.per_second) > 1 and any(answer.plan.throttled)):
        return ""
    earned = ", ".join(f"{name} {doc.number(value)}" for name, value in answer.per_second.items())
    return (
        f"A full engine with one class alone earns per second: {earned}. Where engines run several prompts "
        f"in a step: router density-deep:order={'/'.join(answer.per_second)}."
    )


def _levels(answer: FluidAnswer) -> Iterator[str]:
    for name, price in answer.plan.shadows.levels.items():
        what = LEVELS.get(name, f"share of {name.removeprefix('served.')} served")
        worth, unit = (price / 1000, "ms") if name == "tpot" else (price, "unit")
        costs = f"costs {doc.number(abs(worth))} per engine and {unit}"
        yield f"Level: {what} {costs if abs(price) > 1e-6 else 'does not bind'}."


def _zero(value: float, tiny: float = 1e-9) -> float:
    return 0.0 if abs(value) < tiny else float(value)
