"""Which routers a command should run: from flags or a file, each made once so that mistakes cost nothing."""

from __future__ import annotations

from typing import Any

from headgate.core.errors import InputError, unknown
from headgate.experiment.run import DEFAULT_ROUTER, Prepared, Routed
from headgate.methods.make import router_parameters, split_name


def choose_routers(texts: list[str], prepared: Prepared) -> dict[str, Routed]:
    """Every router by what the user called it; none where there is one engine.

    A setting of all (`--set-router`) goes to those that have such a parameter.
    """
    words, setup = prepared.words, prepared.fleet()
    if setup is None:
        if texts:
            raise InputError(f"--router {texts[0]} needs engines to choose from; give --engines or drop it")
        return {}
    chosen: dict[str, Routed] = {}
    known: set[str] = set()
    made: list[tuple[str, dict[str, Any]]] = []
    for text in texts or [words.router or DEFAULT_ROUTER]:
        name, own = split_name(text, "router")
        parameters = router_parameters(name)
        known |= set(parameters)
        settings = {key: value for key, value in words.set_router.items() if key in parameters} | own
        same = name, setup.router(name, settings, prepared.workload, words.seed)[1]
        if same in made:
            raise InputError(f"compare needs different routers; {text!r} is there twice, drop one")
        made.append(same)
        chosen[text] = name, settings
    for setting in words.set_router:
        if setting not in known:
            raise unknown("parameter of any of these routers", setting, known)
    return chosen
