"""Table 13 of the EB paper: fixed shares against the adaptive threshold, RTX PRO 6000."""

from __future__ import annotations

from math import isfinite

from headgate.workloads.lengths import Fixed, Gamma
from headgate_papers.eb.lengths import DATA_SETS
from headgate_papers.eb.published import CARDS, RTX, TABLE13, TABLE13_SHARES
from headgate_papers.report import Cell, Count, Report, Row, Section, sign_pairs
from headgate_papers.serving import Job, Load, Options, Outcomes

NAME = "eb-table13"
ABOUT = "fixed shares 0.1 to 0.9 against the adaptive threshold, Gamma(2) and ShareGPT, RTX PRO 6000"
CARD = CARDS[RTX, "8B"]
REQUESTS, SLOTS, PROMPT = 3000, 1024, 512
MODES = {"adaptive": "eb-online", "adaptive, paper": "eb-paper"}


def loads(options: Options) -> dict[str, Load]:
    """The two workloads."""
    many, chat = options.requests(REQUESTS), DATA_SETS["ShareGPT"]
    return {
        "Gamma(2)": Load(many, 2048, Fixed(PROMPT), Gamma(256, 2)),
        "ShareGPT": Load(many, 2048, chat.prompt, chat.output),
    }


def jobs(options: Options) -> list[Job]:
    """Nine fixed shares and two ways to plan, for each workload."""
    found = []
    for name, load in loads(options).items():
        for share in TABLE13_SHARES:
            refill = {"refill": round(share * SLOTS)}
            found.append(Job((name, share), CARD, load, "eb", refill, SLOTS))
        for mode, policy in MODES.items():
            found.append(Job((name, mode), CARD, load, policy, {}, SLOTS))
    return found


def judge(outcomes: Outcomes, options: Options) -> Report:
    """Throughput, and all of it as a share of the best fixed one."""
    rate, share = [], []
    settings: tuple[float | str, ...] = (*TABLE13_SHARES, *MODES)
    for setting in settings:
        row = tuple(_cell(outcomes, name, setting) for name in TABLE13)
        best = [_best(outcomes, name) for name in TABLE13]
        parts = (Cell(x.published / y.published, x.ours / y.ours) for x, y in zip(row, best, strict=True))
        label = setting if isinstance(setting, str) else f"theta={setting}"
        rate.append(Row(label, row))
        share.append(Row(label, tuple(parts)))
    columns = tuple(TABLE13)
    return Report(
        NAME,
        "the adaptive threshold against fixed ones",
        (
            f"Card {CARD}, closed loop of 2048 clients, {options.requests(REQUESTS)} requests, N = {SLOTS}, "
            f"B = 16384; Gamma(2) outputs of mean 256 after prompts of {PROMPT}. N and the prompts of the "
            "Gamma runs are not published; ShareGPT lengths as in eb-table2.",
            "'adaptive' is eb-online as it is (mode stationary); 'adaptive, paper' its mode with the paper's "
            "theta_0 + Delta theta and bound (6), next to the same published number.",
        ),
        (
            Section("tok/s, prompt and output", "threshold", columns, tuple(rate)),
            Section("Share of the best fixed theta", "threshold", columns, tuple(share)),
        ),
        _counts(rate),
        _remarks(rate, share, outcomes),
    )


def _cell(outcomes: Outcomes, name: str, setting: float | str) -> Cell:
    place = -1 if isinstance(setting, str) else TABLE13_SHARES.index(setting)
    return Cell(TABLE13[name][place], outcomes.figure((name, setting), "tokens"))


def _best(outcomes: Outcomes, name: str) -> Cell:
    """The best fixed share, published and ours."""
    found = [outcomes.figure((name, share), "tokens") for share in TABLE13_SHARES]
    ours = max((rate for rate in found if isfinite(rate)), default=float("nan"))
    return Cell(max(TABLE13[name][:-1]), ours)


def _counts(rows: list[Row]) -> tuple[Count, ...]:
    fixed = rows[: len(TABLE13_SHARES)]
    pairs = [
        (before.cells[place], after.cells[place])
        for place in range(len(TABLE13))
        for number, before in enumerate(fixed)
        for after in fixed[number + 1 :]
    ]
    near: list[tuple[object, object]] = [
        (_close(row, fixed, place, True), _close(row, fixed, place, False))
        for row in rows[len(fixed) :]
        for place in range(len(TABLE13))
    ]
    return (
        Count.of_pairs(
            "which of two fixed shares serves more (published differences above 1 %)", sign_pairs(pairs)
        ),
        Count.of_pairs("adaptive within 3 % of the best fixed share (both modes, both workloads)", near),
    )


def _close(row: Row, fixed: list[Row], place: int, published: bool) -> bool:
    """Within 3 % of the best fixed share?"""
    if published:
        return row.cells[place].published >= 0.97 * max(other.cells[place].published for other in fixed)
    return row.cells[place].ours >= 0.97 * max(other.cells[place].ours for other in fixed)


def _remarks(rate: list[Row], share: list[Row], outcomes: Outcomes) -> tuple[str, ...]:
    ratios = [[row.cells[place].ratio for row in rate] for place in range(2)]
    worst = [min(row.cells[place].ours for row in share[: len(TABLE13_SHARES)]) for place in range(2)]
    evicted = [outcomes.figure(("Gamma(2)", theta), "evictions") for theta in (0.1, 0.9)]
    adaptive = [100 * cell.ours for cell in share[len(TABLE13_SHARES)].cells]
    return (
        f"The adaptive threshold serves {adaptive[0]:.1f} and {adaptive[1]:.1f} % of the best fixed one "
        "(published: 98 and 98 %).",
        f"Level: {min(ratios[0]):.2f} to {max(ratios[0]):.2f} (Gamma) and {min(ratios[1]):.2f} to "
        f"{max(ratios[1]):.2f} (ShareGPT) times the published. The published Gamma runs serve a third of "
        "what Table 3 has for the same card and mean output; which N and prompts they had is not said.",
        f"Curve: published rates rise to theta = .6 or .7. Ours are flat within "
        f"{100 * (1 - worst[0]):.0f} and {100 * (1 - worst[1]):.0f} %: a refill costs one prefill constant. "
        f"What rise there is for Gamma comes from memory: {evicted[0]:.0f} evictions at theta = .1, "
        f"{evicted[1]:.0f} at .9, because N = {SLOTS} such requests do not fit.",
    )
