"""The words of a run as flags, defined once for every command that runs one."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_type_hints

import typer

from headgate.core.errors import InputError
from headgate.experiment.settings import Experiment, experiment
from headgate.settings_base import read_words


class Word(NamedTuple):
    """One flag: its name in an experiment file, its type and what it means."""

    name: str
    kind: type
    help: str
    panel: str


ENGINE, LENGTHS, LOAD, TRACE, FLEET = "Engine", "Lengths", "Load", "Trace", "Fleet"
WORDS = (
    Word("card", str, "cost card: a built-in name (see `headgate doctor`) or a file", ENGINE),
    Word("slots", int, "requests that may run at once, vLLM's max_num_seqs (default: 256)", ENGINE),
    Word("budget", int, "tokens in one step, vLLM's max_num_batched_tokens (default: 8192)", ENGINE),
    Word("kv_tokens", int, "KV memory in tokens (default: the card's)", ENGINE),
    Word("block", int, "KV tokens per block (default: the card's)", ENGINE),
    Word("model_len", int, "most tokens of one request, prompt and output (default: the card's)", ENGINE),
    Word(
        "asynchronous",
        bool,
        "simulate as vLLM runs: compose a step while the one before runs",
        ENGINE,
    ),
    Word("workload", str, "length law: fixed, uniform, geometric, gamma, lognormal, lengths=FILE", LENGTHS),
    Word("prompt", float, "mean prompt tokens (default: 512)", LENGTHS),
    Word("output", float, "mean output tokens (default: 512)", LENGTHS),
    Word("prompt_law", str, "another law for prompts alone", LENGTHS),
    Word("output_law", str, "another law for outputs alone", LENGTHS),
    Word("shape", float, "shape of gamma lengths (default: 2)", LENGTHS),
    Word("sigma", float, "sigma of lognormal lengths (default: 1)", LENGTHS),
    Word("spread", float, "half-width of uniform lengths, as a share of the mean (default: 0.5)", LENGTHS),
    Word("cap_prompt", int, "cut longer prompts to this", LENGTHS),
    Word("cap_output", int, "cut longer outputs to this", LENGTHS),
    Word(
        "clients",
        int,
        "closed loop: so many clients, each sends when its last request returns (default: 64)",
        LOAD,
    ),
    Word("rate", float, "open loop: requests per second", LOAD),
    Word("arrivals", str, "of an open loop: poisson, gamma, constant, all-at-once", LOAD),
    Word("burstiness", float, "of gamma arrivals; 1 is Poisson, smaller is burstier", LOAD),
    Word("all_at_once", bool, "everybody is there at the start", LOAD),
    Word("requests", int, "how many requests (default: 1000, or the whole trace)", LOAD),
    Word("seed", int, "one number for all randomness (default: 0)", LOAD),
    Word("ttft", str, "promised time to first token, such as 500ms (for goodput)", LOAD),
    Word("tpot", str, "promised time per output token, such as 50ms (for goodput)", LOAD),
    Word("patience", str, "seconds in the queue after which a request gives up", LOAD),
    Word("abort", str, "seconds after arrival at which every client hangs up", LOAD),
    Word("watchdog", str, "stop when a request gets nothing for so long (default: 1h)", LOAD),
    Word("trace", str, "a trace file, or a bundled one: azure-conv, azure-code, sharegpt-8k", TRACE),
    Word("format", str, "azure, burstgpt, mooncake, qwen, vidur, vtc (default: told from the file)", TRACE),
    Word("slice", str, "a part of the trace, such as 10min..20min", TRACE),
    Word("scale_rate", float, "send it so many times faster", TRACE),
    Word("skip_bad_rows", bool, "leave out bad rows and say how many", TRACE),
    Word("sort", bool, "sort a trace that is out of order", TRACE),
)
FLEET_WORDS = (
    Word("engines", int, "so many engines behind a router (default: one, without a router)", FLEET),
    Word("transfer_delay", str, "to hand KV over: before the first byte (default: 2ms)", FLEET),
    Word("kv_bytes", float, "to hand KV over: bytes of one token (default: 147456, Qwen3-8B)", FLEET),
    Word("bandwidth", float, "to hand KV over: GB/s between two engines (default: 50)", FLEET),
    Word("prompt_price", float, "of a prompt token, for plans and revenue (default: 1)", FLEET),
    Word("output_price", float, "of an output token (default: 2)", FLEET),
)
SETTINGS = {"set": "refill=48", "set_router": "prefill=2"}  # as examples
Command = Callable[..., None]


def takes_words(command: Command) -> Command:
    """Give a command all flags of a run; it gets them as `words`, an Experiment."""
    return _taking(command, WORDS)


def takes_fleet_words(command: Command) -> Command:
    """The same for a command that can run a fleet."""
    return _taking(command, (*WORDS, *FLEET_WORDS))


def _taking(command: Command, words: tuple[Word, ...]) -> Command:
    hints = get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[parameter.name])
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name != "words"
    ]

    @functools.wraps(command)
    def with_words(**values: Any) -> None:
        flags = {word.name: values.pop(word.name) for word in words}
        file, mix, settings = values.pop("file"), values.pop("mix"), values.pop("set")
        command(words=gather(file, mix, flags, settings, values.pop("set_router", None)), **values)

    flags = [_parameter(word.name, word.kind, word.help, word.panel) for word in words]
    extra = [
        inspect.Parameter(
            "file",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                str | None, typer.Argument(help="an experiment file (TOML); flags override what it says")
            ],
        ),
        _parameter("set", list, "a parameter of the policy, NAME=VALUE; what --policy says wins", "Policy"),
        _parameter("mix", str, "classes of requests from a TOML file of class tables", LENGTHS),
    ]
    if words is not WORDS:
        about = "a parameter of the router, NAME=VALUE; what --router says wins"
        extra.append(_parameter("set_router", list, about, FLEET))
    with_words.__signature__ = inspect.Signature([*extra, *own, *flags])  # type: ignore[attr-defined]
    with_words.__annotations__ = {p.name: p.annotation for p in (*extra, *own, *flags)}
    return with_words


def _parameter(name: str, kind: type, help: str, panel: str) -> inspect.Parameter:
    shown: Any = list[str] if kind is list else kind
    flag = "--" + name.replace("_", "-")
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[shown | None, typer.Option(flag, help=help, rich_help_panel=panel)],
    )


def gather(
    file: str | None,
    mix: str | None,
    flags: dict[str, Any],
    settings: list[str] | None,
    router: list[str] | None = None,
) -> Experiment:
    """The words of a file, overridden by flags."""
    words = {} if file is None else read_words(file)
    where = "" if file is None else f"experiment file {file}: "
    experiment(words, where)  # so that a mistake in the file is not blamed on the flags
    if mix is not None:
        words |= _classes(mix)
    words |= {name: value for name, value in flags.items() if value is not None}
    for name, texts in (("set", settings), ("set_router", router)):
        if texts:
            words[name] = {**words.get(name, {}), **settings_of(texts, name)}
    return experiment(words)


def _classes(mix: str) -> dict[str, Any]:
    """The classes in a mix file."""
    words = read_words(mix, "mix file")
    if set(words) != {"classes"}:
        raise InputError(f"mix file {mix}: must hold [[classes]] tables and nothing else; mend it")
    experiment(words, f"mix file {mix}: ")
    return words


def settings_of(texts: list[str], word: str = "set") -> dict[str, str]:
    """Several --set NAME=VALUE as one table."""
    flag, found = "--" + word.replace("_", "-"), dict[str, str]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise InputError(f"{flag} {text!r} is not NAME=VALUE; write it as {flag} {SETTINGS[word]}")
        if name.strip() in found:
            raise InputError(f"{flag} {name.strip()} is given twice; drop one of the two")
        found[name.strip()] = value.strip()
    return found
