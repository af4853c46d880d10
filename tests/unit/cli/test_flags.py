"""Flags come from declared settings: a field more is a flag more, in every command that takes the table."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from headgate.advisor.settings import (
    FleetSettings,
    LevelSettings,
    SearchSettings,
    StepSettings,
)
from headgate.cli.flags import takes_settings
from headgate.cli.plan import capacity, fluid
from headgate.cli.serve import serve
from headgate.cli.simulate import compare, simulate, sweep
from headgate.core.errors import InputError
from headgate.experiment.settings import Experiment
from headgate.live.engine.settings import Settings
from headgate.settings_base import (
    Count,
    Positive,
    Seconds,
    Setting,
    SettingsModel,
    Switch,
    declared,
    parameters,
)
from headgate_papers.wait.command import wait
from headgate_papers.wait.plan import WaitSettings

TABLES = [
    (simulate, Experiment),
    (compare, Experiment),
    (sweep, Experiment),
    (serve, Settings),
    (fluid, FleetSettings),
    (fluid, StepSettings),
    (fluid, LevelSettings),
    (wait, WaitSettings),
    (capacity, SearchSettings),
]


def declared_flags(table):
    return {
        name: field
        for name, field in table.model_fields.items()
        if isinstance(field.json_schema_extra, dict) and field.json_schema_extra["flag"] is not None
    }


@pytest.mark.parametrize(("command", "table"), TABLES)
def test_every_declared_setting_is_a_flag_of_its_command(command, table):
    flags = inspect.signature(command).parameters
    for name, field in declared_flags(table).items():
        option = flags[name].annotation.__metadata__[0]
        assert option.rich_help_panel == field.json_schema_extra["panel"]
        assert option.help.startswith(field.description)
        assert flags[name].default is None  # or a flag that was not given would override a file


def test_only_tables_and_lists_of_an_experiment_are_no_flags():
    left = set(Experiment.model_fields) - set(declared_flags(Experiment))
    assert left == {"policy", "policies", "router", "routers", "classes", "stages"}


def test_plans_for_one_engine_have_no_flags_of_fleets():
    assert "transfer_delay" in inspect.signature(simulate).parameters
    assert not {"engines", "transfer_delay", "set_router"} & set(inspect.signature(wait).parameters)


class Oven(SettingsModel):
    """Settings of something that headgate does not have."""

    heat: Positive = declared("Oven", "degrees", 180.0, le=300)
    trays: Count | None = declared("Oven", "at once (default: all)")
    bake: Seconds = declared("Oven", "how long (default: 10min)", 600.0)
    fan: Switch = declared("Oven", "with the fan", True)
    light: Switch = declared("Oven", "with the light", False)
    cakes: tuple[str, ...] = declared("Oven", "by name", (), flag="--cake")
    knob: dict[str, Setting] = parameters("Oven", "NAME=VALUE", "grill=2")
    secret: str = declared("Oven", "left to the commands", "x", flag=None)


@takes_settings
def baked(oven: Oven, loud: bool = False) -> None:
    print(oven.model_dump(), loud)


@takes_settings
def told(given: Annotated[dict[str, Any], Oven]) -> None:
    print(given)


def run(command, *args, code=0):
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result


def test_flags_become_checked_settings():
    args = "--heat 200 --bake 45min --no-fan --light --cake a --cake b --knob grill=3 --loud"
    out = run(baked, *args.split()).output
    want = {"heat": 200.0, "trays": None, "bake": 2700.0, "fan": False, "light": True, "cakes": ("a", "b")}
    assert out.strip() == f"{want | {'knob': {'grill': '3'}, 'secret': 'x'}} True"


def test_what_is_not_given_has_the_default_of_the_field():
    assert run(baked).output.strip() == f"{Oven().model_dump()} False"
    assert run(told, "--bake", "45min").output.strip() == "{'bake': '45min'}"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--heat", "301"], "heat: 301.0 is not allowed; give at most 300.0"),
        (["--heat", "0"], "give a number above 0"),
        (["--trays", "0"], "trays: 0 is not allowed; give at least 1"),
        (["--bake", "soon"], "'soon' is not a duration"),
        (["--knob", "grill"], "--knob 'grill' is not NAME=VALUE; write it as --knob grill=2"),
        (["--knob", "a=1", "--knob", "a=2"], "--knob a is given twice"),
    ],
)
def test_mistakes_are_one_line(args, says):
    error = run(baked, *args, code=1).exception
    assert isinstance(error, InputError) and says in str(error) and "\n" not in str(error)


def test_help_names_meaning_and_default(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    text = run(baked, "--help").output
    for said in ("degrees (default: 180.0)", "at once (default: all)", "how long (default: 10min)"):
        assert said in text
    assert "--no-fan" in text and "--no-light" not in text and "--secret" not in text and "Oven" in text


def test_flags_override_a_file_one_by_one(headgate, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('policy = "eb"\nrequests = 30\nslots = 8\nclients = 8\nset = {refill = 2, slots = 4}\n')
    out = tmp_path / "run"
    assert headgate("simulate", file, "--set", "refill=3", "--requests", 20, "--out", out).code == 0
    meta = (out / "run.json").read_text()
    assert '"refill": 3' in meta and '"slots": 4' in meta and '"requests": 20' in meta
