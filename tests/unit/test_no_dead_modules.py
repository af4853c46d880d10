"""Every module of the package is used by another one or by a tool; what only tests use belongs to tests."""

from __future__ import annotations

import ast
from pathlib import Path

from headgate.cli import COMMANDS
from headgate.methods.names import BATCH, ROUTE

SOURCE = Path(__file__).parents[2] / "src"
ENTRANCES = {  # what users or other programs import
    "headgate",
    "headgate.cli",  # the command
    "headgate.vllm",  # vLLM's --scheduler-cls
    "headgate.live.vllm.front",  # one of vLLM's plug-ins
    "headgate.live.sglang.entry",  # one of SGLang's
}


def module_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(path: Path) -> set[str]:
    """Modules that a file names: in imports, and as text (public names are loaded when first used)."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {word.strip(";,") for word in node.value.split() if word.startswith("headgate.")}
    return found


def test_every_module_is_imported_by_another():
    files = {module_of(path): path for path in SOURCE.rglob("*.py")}
    used = {name for module, path in files.items() for name in imported(path) - {module}}
    used |= {name for path in SOURCE.with_name("tools").glob("*.py") for name in imported(path)}
    used |= {f"headgate.cli.{command}" for command in COMMANDS}  # imported when it runs
    used |= {kind.__module__ for table in (BATCH, ROUTE) for kind in table.values()}  # when it is looked up
    unused = [
        module
        for module, path in files.items()
        if module not in used and module not in ENTRANCES and path.name != "__init__.py"
    ]
    assert not unused, f"nothing in src imports {', '.join(sorted(unused))}"
