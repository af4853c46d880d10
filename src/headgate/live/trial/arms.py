"""The arms of a trial, and the settings file through which a server takes each of them over.

Whatever happens to the trial, the file is put back byte for byte: at the end, on a signal, and by a small
process of its own where the trial is killed outright.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from headgate.core.errors import InputError, RunError
from headgate.live.engine.policy import check_policy
from headgate.live.engine.settings import Settings, check_words, merge, read_file
from headgate.live.files import read_regular
from headgate.live.vllm import VLLM

URL = re.compile(r"https?://\S+")
LABELLED = re.compile(r"([^=:/]{1,40})=(.+)", re.DOTALL)
AS_IS = "as is"  # the arm that the file itself says
MOST_ARMS = 6
PROMISES = ("ttft", "tbt", "classes", "floor", "delivery", "clients_may")  # must be the same for all arms
ENDINGS = (".toml", ".json")

# Waits until the trial ends. "k" says that the trial has put the file back itself; no word, that it died.
GUARD = """
import os, sys
path, size = sys.argv[1], int(sys.argv[2])
before = sys.stdin.buffer.read(size)
if len(before) == size and sys.stdin.buffer.read(1) != b"k":
    try:
        mode = os.stat(path).st_mode & 0o7777
        with open(path + ".restored", "wb") as file:
            file.write(before)
        os.chmod(path + ".restored", mode)
        os.replace(path + ".restored", path)
    except OSError:
        with open(path, "wb") as file:
            file.write(before)
"""


@dataclass(frozen=True)
class Arm:
    """Settings over those of the file, or a server of its own."""

    name: str
    words: Mapping[str, Any] = field(default_factory=dict)
    url: str = ""

    def with_trace(self, path: str) -> Arm:
        return Arm(self.name, {**self.words, "trace": path}, self.url)


def read_arms(texts: Sequence[str], config: str | None, promises: Mapping[str, Any]) -> tuple[Arm, ...]:
    """What --arm said: POLICY, a settings file or URL, each with NAME= before it or not.

    With one arm alone the baseline is what the settings file says now. `promises` hold for all arms.
    """
    found = [_labelled(text) for text in texts]
    urls = [bool(URL.fullmatch(said)) for _, said in found]
    if any(urls):
        if not all(urls) or config is not None:
            raise InputError("--arm NAME=URL compares servers, and needs no --config; give URLs or settings")
        arms = [Arm(label or said.split("//")[1], url=said.rstrip("/")) for label, said in found]
    else:
        if config is None:
            raise InputError(
                "--arm needs --config FILE, the settings file that HEADGATE_CONFIG of the server names; "
                "or compare servers, --arm NAME=URL"
            )
        base = check_words(read_file(config), f"settings file {config}: ")
        arms = [Arm(AS_IS, base)] if len(found) == 1 else []
        arms += [Arm(label or said, _over(base, said)) for label, said in found]
        arms = [Arm(arm.name, {**arm.words, **promises}) for arm in arms]
        _check(arms, {**base, **promises})
    _refuse_equal(arms)
    return tuple(arms)


def _labelled(text: str) -> tuple[str, str]:
    found = LABELLED.fullmatch(text.strip())
    label, said = (found[1].strip(), found[2].strip()) if found else ("", text.strip())
    if not said or not text.isprintable():
        raise InputError(f"--arm {text!r} is empty; name a policy, such as --arm keep")
    return label, said


def _over(base: Mapping[str, Any], said: str) -> dict[str, Any]:
    """The file's settings with another policy, or with what another file says."""
    own = (
        check_words(read_file(said), f"settings file {said}: ")
        if said.endswith(ENDINGS)
        else {"policy": said}
    )
    lower = {name: value for name, value in base.items() if not (name == "set" and "policy" in own)}
    return {**lower, **own}


def _check(arms: Sequence[Arm], base: Mapping[str, Any]) -> None:
    """As the server will read them: a mistake is better told now."""
    for arm in arms:
        for name in PROMISES:
            if arm.words.get(name) != base.get(name):
                raise InputError(
                    f"arm {arm.name} changes {name}; all arms must promise the same, or kept means two things"
                )
        if arm.words.get("trace") != base.get("trace"):
            raise InputError(f"arm {arm.name} changes trace, which a running server cannot; drop it")
        try:
            check_policy(merge(dict(arm.words), None, ""), VLLM)
        except InputError as error:
            raise InputError(f"arm {arm.name}: {error}") from None


def _refuse_equal(arms: Sequence[Arm]) -> None:
    if not 2 <= len(arms) <= MOST_ARMS:
        raise InputError(f"{len(arms)} arms; compare 2 to {MOST_ARMS}, such as --arm vllm --arm auto")
    for place, arm in enumerate(arms):
        for other in arms[:place]:
            if arm.name == other.name:
                raise InputError(
                    f"two arms are called {arm.name}; drop one, or name them (--arm a=mixed --arm b=mixed) "
                    "to see what a trial says when there is no difference"
                )
            if arm.url and arm.url == other.url:
                raise InputError(f"arms {other.name} and {arm.name} are one server; give two")
            same = not arm.url and arm.words == other.words
            if same and AS_IS in (arm.name, other.name):
                raise InputError(f"arm {arm.name} is what the settings file says already; give another arm")


class SettingsFile:
    """The file that a running server reads again when it changes."""

    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        try:
            self.original = self._ours = read_regular(self.path)
        except OSError as error:
            raise _unusable(path, error) from None
        self._guard: subprocess.Popen[bytes] | None = None

    def take(self) -> None:
        """From now on it is ours; refuses a file that cannot be written."""
        try:
            self._write(self.original)
        except OSError as error:
            raise _unusable(self.path, error) from None
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-c", GUARD, self.path, str(len(self.original))],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for us
        )
        assert self._guard.stdin is not None
        self._guard.stdin.write(self.original)
        self._guard.stdin.flush()

    def put(self, words: Mapping[str, Any], mark: str) -> None:
        """Any settings file may hold JSON: readers tell it by its first letter."""
        self._refuse_changed()
        try:
            self._write(json.dumps({**words, "mark": mark}, indent=1).encode() + b"\n")
        except OSError as error:
            raise RunError(f"settings file {self.path}: {error.strerror or error}; the trial ends") from None

    def restore(self) -> None:
        """As it was, byte for byte, unless another has changed it meanwhile. May be called again."""
        if self._guard is None:
            return
        guard, self._guard = self._guard, None
        try:
            with suppress(RunError):
                self._refuse_changed()
                self._write(self.original)
        finally:
            _release(guard)

    def _refuse_changed(self) -> None:
        try:
            now = read_regular(self.path)
        except OSError:
            now = b""
        if now != self._ours:
            raise RunError(
                f"settings file {self.path} was changed by another; the trial ends and leaves it as it is"
            )

    def _write(self, text: bytes) -> None:
        """Whole or not at all; in place where the file cannot be replaced, as in a container's mount."""
        new = f"{self.path}.new"
        try:
            with open(new, "xb") as file:
                file.write(text)
            os.chmod(new, os.stat(self.path).st_mode & 0o7777)
            os.replace(new, self.path)
        except OSError:
            with suppress(OSError):
                os.unlink(new)
            with open(self.path, "r+b") as file:
                file.write(text)
                file.truncate()
        self._ours = text


def _release(guard: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        assert guard.stdin is not None
        guard.stdin.write(b"k")
        guard.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        guard.wait(5.0)


def _unusable(path: str, error: OSError) -> InputError:
    return InputError(
        f"settings file {path}: {error.strerror or error}; name the file that HEADGATE_CONFIG of the server "
        "names, and make it writable"
    )


def base_settings(config: str | None, promises: Mapping[str, Any]) -> Settings:
    """What the file says now, with the promises that flags add."""
    words = check_words(read_file(config), f"settings file {config}: ") if config else {}
    return merge({**words, **promises}, None, "")
