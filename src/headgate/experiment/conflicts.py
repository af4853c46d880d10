"""Words that do not go together: each is refused, because the other would silently win."""

from __future__ import annotations

from headgate.core.errors import InputError
from headgate.experiment.settings import ClassSettings, Experiment, Lengths
from headgate.workloads.bundled import BUNDLED, bundled_format
from headgate.workloads.lengths import FROM_FILE

MAKE_LENGTHS = ("prompt", "output", "workload", "prompt_law", "output_law", "shape", "sigma", "spread")
MAKE_SESSIONS = ("shared_prefix", "turns", "think")
ABOUT_TRACES = ("format", "columns", "times", "spread_ticks", "slice", "scale_rate", "skip_bad_rows", "sort")
HAND_OVER = ("transfer_delay", "kv_bytes", "bandwidth", "send_time")
ABOUT_FLEETS = ("router", "routers", "set_router", "outages", *HAND_OVER)
LOADS = ("clients", "rate", "all_at_once")
AT_ONCE = "all-at-once"
OWN = {"shape": "gamma", "sigma": "lognormal", "spread": "uniform"}  # a parameter belongs to one length law


def refuse_conflicts(words: Experiment) -> None:
    """Every word must have an effect."""
    if words.trace is None:
        _refuse(words, ABOUT_TRACES, "is about traces; give --trace FILE or drop it")
        _refuse_idle_lengths(words, "")
    else:
        _check_trace(words, words.trace)
    _refuse_both(words, "")
    if words.classes:
        _check_classes(words)
    if words.engines is None:
        _refuse(words, ABOUT_FLEETS, "is about fleets; give --engines or drop it")
    _check_load(words)
    if words.think and not words.turns:
        raise InputError("--think is the time between turns; give --turns or drop it")
    if words.stages:
        _check_stages(words)


def flag(word: str) -> str:
    """What messages call a word: the flag, or the table of an experiment file."""
    return f"[[{word}]]" if word in ("classes", "stages") else "--" + word.replace("_", "-")


def at_once(words: Experiment) -> bool:
    """Whether everybody is to be there at the start, in either spelling."""
    return words.all_at_once or words.arrivals == AT_ONCE


def _given(words: Lengths, word: str) -> bool:
    return word in words.model_fields_set and getattr(words, word) not in (None, False, ())


def _refuse(words: Lengths, names: tuple[str, ...], why: str) -> None:
    for word in names:
        if _given(words, word):
            raise InputError(f"{flag(word)} {why}")


def _check_trace(words: Experiment, trace: str) -> None:
    lengths = (*MAKE_LENGTHS, *MAKE_SESSIONS, "classes", "stages")
    _refuse(words, lengths, "makes lengths, but --trace brings its own; drop one of the two")
    if words.scale_rate and (words.clients or words.rate or at_once(words)):
        raise InputError("--scale-rate changes the trace's own times, another load replaces them; choose one")
    if words.columns and words.format:
        raise InputError(f"--format {words.format} and --columns both say what the columns are; drop one")
    if trace in BUNDLED and (words.columns or words.times):
        raise InputError(f"--columns and --times are about files, {trace} is a bundled trace; drop them")
    if trace in BUNDLED and words.format not in (None, own := bundled_format(trace)):
        raise InputError(f"--format {words.format}, but {trace} is a bundled trace in {own}'s; drop --format")


def _refuse_idle_lengths(words: Lengths, where: str) -> None:
    """A parameter of a law that nobody draws from, or a law that both sides replace."""
    laws = {words.prompt_law or words.workload, words.output_law or words.workload}
    for parameter, law in OWN.items():
        if _given(words, parameter) and law not in laws:
            raise InputError(
                f"{where}{flag(parameter)} belongs to {law} lengths; drop it or choose --workload {law}"
            )
    if words.prompt_law and words.output_law and _given(words, "workload"):
        raise InputError(f"{where}--workload is replaced by --prompt-law and --output-law; drop it")
    if any(law == FROM_FILE for law in laws):
        raise InputError(f"{where}lengths= names no file; write lengths=FILE")


def _refuse_both(words: Experiment | ClassSettings, where: str) -> None:
    """One promise between tokens: of every gap, or of their mean."""
    if words.tbt and words.tpot:
        raise InputError(
            f"{where}--tbt promises every gap, --tpot the mean of a request; drop one of the two"
        )


def renamed_promise(words: Experiment) -> list[str]:
    """What --tbt means, said until 0.3: it was another name of --tpot."""
    if not (words.tbt or any(each.tbt for each in words.classes)):
        return []
    return ["--tbt promises every gap, as in serve and --slo; it was the mean of a request, which is --tpot"]


def _check_classes(words: Experiment) -> None:
    lengths = (*MAKE_LENGTHS, "shared_prefix", "ttft", "tbt", "tpot")
    _refuse(words, lengths, "does not reach the classes of a mix; say it in each [[classes]] table")
    for number, share in enumerate(words.classes):
        _refuse_idle_lengths(share, f"classes.{number}: ")
        _refuse_both(share, f"classes.{number}: ")
        if share.patience and words.patience:
            raise InputError(f"--patience, but class {share.name!r} has its own; say it in one place")


def _check_load(words: Experiment) -> None:
    """One kind of load, and nothing that belongs to another."""
    given = [word for word in LOADS if getattr(words, word)]
    if words.arrivals == AT_ONCE and "all_at_once" not in given:
        given.append("arrivals")
    if len(given) > 1:
        raise InputError(f"{flag(given[0])} and {flag(given[1])} are two kinds of load; choose one")
    timed = [word for word in ("arrivals", "burstiness") if getattr(words, word)]
    if at_once(words):
        timed = [word for word in timed if getattr(words, word) != AT_ONCE]
        if timed:
            raise InputError(
                f"{flag(timed[0])}, but all requests are there at the start; drop one of the two"
            )
    elif timed and words.rate is None and not (words.stages and all(stage.rate for stage in words.stages)):
        raise InputError(f"{flag(timed[0])} needs --rate; give requests per second")


def _check_stages(words: Experiment) -> None:
    """All stages are of one kind of load, and no word is replaced by every stage."""
    for word in ("rate", "clients", "prompt", "output"):
        own = [getattr(stage, word) is not None for stage in words.stages]
        if all(own) and _given(words, word):
            raise InputError(f"{flag(word)} is replaced by every stage's own; drop it")
        if word in ("rate", "clients") and any(own):
            if at_once(words) or _given(words, "clients" if word == "rate" else "rate"):
                raise InputError(f"a stage has its own {word}, but the load is of another kind; choose one")
            if not all(own) and not _given(words, word):
                missing = own.index(False)
                raise InputError(f"stage {missing} has no {word}, others have; add it or give {flag(word)}")
    if any(stage.rate for stage in words.stages) and any(stage.clients for stage in words.stages):
        raise InputError("stages with a rate and stages with clients in one load; run them one by one")
