"""The arms of a trial, and the settings file through which a server takes each of them over.

Whatever happens to the trial, the file is put back byte for byte: at the end, on a signal, and by a small
process of its own where the trial is killed outright.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EACCES, EBUSY, EPERM, EROFS, EXDEV
from hashlib import sha256
from tempfile import mkstemp
from typing import Any

from headgate.core.errors import InputError, RunError
from headgate.core.files import read_regular
from headgate.live.engine.policy import check_policy
from headgate.live.engine.settings import (
    AUTO,
    Settings,
    check_words,
    merge,
    over_promises,
    read_file,
    where_is,
)
from headgate.live.vllm import VLLM
from headgate.settings_base import BETWEEN

URL = re.compile(r"https?://\S+")
LABELLED = re.compile(r"([^=:/]{1,40})=(.+)", re.DOTALL)
AS_IS = "as is"  # the arm that the file itself says
MOST_ARMS = 6
# must be the same for all arms
PROMISES = ("ttft", *BETWEEN, "classes", "floor", "delivery", "clients_may")
BACK = "the server is back at its settings"
LEFT = "the settings file is left as it was edited"
IN_PLACE = (EBUSY, EXDEV, EACCES, EPERM, EROFS)  # the folder or the mount forbids another file

GUARD_IMPORTS = """
import os, sys, time
from contextlib import suppress
from hashlib import sha256
from tempfile import mkstemp

"""
# Waits until the trial ends, and puts back the bytes it was given first, if the file holds one of the texts
# whose digests came since. "*" says that a write in place is under way: the file is ours whatever it holds.
# "k" comes last where there is nothing to put back. A full disk may have room again soon.
GUARD = """
path, size, in_place = sys.argv[1], int(sys.argv[2]), sys.argv[3].split()
before = sys.stdin.buffer.read(size)
lines = sys.stdin.buffer.read().decode().split()

def put_back():
    with open(path, "rb") as file:
        now = sha256(file.read()).hexdigest()
    if lines[-1:] != ["*"] and now not in lines:
        return
    try:
        replace(path, before)
    except OSError as error:
        if str(error.errno) not in in_place:
            raise
        lines.append("*")
        with open(path, "r+b") as file:
            file.write(before)
            file.truncate()

for _ in range(600 if len(before) == size and lines[-1:] != ["k"] else 0):
    try:
        put_back()
        break
    except FileNotFoundError:
        break
    except OSError:
        time.sleep(1)
"""


@dataclass(frozen=True)
class Arm:
    name: str
    words: Mapping[str, Any] = field(default_factory=dict)
    url: str = ""

    def said(self) -> str:
        common = (*PROMISES, "trace")
        words = [f"{name} = {value}" for name, value in self.words.items() if name not in common]
        return self.url or ", ".join(words) or "the server's own settings"


def read_arms(texts: Sequence[str], config: str | None, promises: Mapping[str, Any]) -> tuple[Arm, ...]:
    """With one arm alone the baseline is what the settings file says now. `promises` hold for all arms."""
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
        base = _words(config)
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
    own = _words(said) if said.endswith((".toml", ".json")) else {"policy": said}
    lower = {name: value for name, value in base.items() if not (name == "set" and "policy" in own)}
    return {**lower, **own}


def _check(arms: Sequence[Arm], base: Mapping[str, Any]) -> None:
    for arm in arms:
        for name in PROMISES:
            if arm.words.get(name) != base.get(name):
                raise InputError(
                    f"arm {arm.name} changes {name}; all arms must promise the same, or kept means two things"
                )
        if arm.words.get("trace") != base.get("trace"):
            raise InputError(f"arm {arm.name} changes trace, which a running server cannot; drop it")
        check_policy(merge(dict(arm.words), None, ""), VLLM, where=f"arm {arm.name}: ")


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
            same = not arm.url and {"policy": AUTO, **arm.words} == {"policy": AUTO, **other.words}
            if same and AS_IS in (arm.name, other.name):
                raise InputError(f"arm {arm.name} is what the settings file says already; give another arm")


class SettingsFile:
    def __init__(self, path: str) -> None:
        self.path = os.path.realpath(path)
        try:
            self.original = read_regular(self.path)
        except OSError as error:
            raise _unusable(path, error) from None
        self._ours: bytes | None = self.original  # None: a write of ours was cut short
        self._guard: subprocess.Popen[bytes] | None = None
        self._state = BACK

    def take(self) -> None:
        try:
            self._write(self.original)
        except OSError as error:
            raise _unusable(self.path, error) from None
        told = [self.path, str(len(self.original)), " ".join(map(str, IN_PLACE))]
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-c", GUARD_IMPORTS + inspect.getsource(replace) + GUARD, *told],
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

    def restore(self) -> str:
        """As it was, unless another has changed it meanwhile. Says how it is now, also when called again."""
        if self._guard is None:
            return self._state
        last_word = b"k"
        try:
            self._refuse_changed()
            self._write(self.original)
        except RunError:
            self._state = LEFT
        except OSError as error:
            self._state = f"settings file {self.path} is not put back yet: {error.strerror or error}"
            last_word = b""  # it goes on trying
        guard, self._guard = self._guard, None
        with suppress(OSError):
            assert guard.stdin is not None
            guard.stdin.write(last_word)
            guard.stdin.close()
        if last_word:
            with suppress(subprocess.TimeoutExpired):
                guard.wait(5.0)
        return self._state

    def _refuse_changed(self) -> None:
        try:
            now = read_regular(self.path)
        except OSError:
            now = b""
        if self._ours is not None and now != self._ours:
            raise RunError(f"settings file {self.path} was changed by another")

    def _write(self, text: bytes) -> None:
        """Whole or not at all; in place where the file cannot be replaced, as in a container's mount."""
        digest = sha256(text).hexdigest()
        self._tell_guard(digest)
        try:
            replace(self.path, text)
        except OSError as error:
            if error.errno not in IN_PLACE:
                raise
            self._ours = None  # a write that fails leaves half of it
            self._tell_guard("*")
            with open(self.path, "r+b") as file:
                file.write(text)
                file.truncate()
            self._tell_guard(digest)
        self._ours = text

    def _tell_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError):  # it was killed
                self._guard.stdin.write(f"{line}\n".encode())
                self._guard.stdin.flush()


def replace(path: str, text: bytes) -> None:
    """By a file of the same owner and mode; PermissionError where we may not make one."""
    before = os.stat(path)
    handle, new = mkstemp(dir=os.path.dirname(path))
    try:
        with open(handle, "wb") as file:
            file.write(text)
        os.chown(new, before.st_uid, before.st_gid)
        os.chmod(new, before.st_mode & 0o7777)
        os.replace(new, path)
    except OSError:
        with suppress(OSError):
            os.unlink(new)
        raise


def _unusable(path: str, error: OSError) -> InputError:
    return InputError(
        f"settings file {path}: {error.strerror or error}; name the file that HEADGATE_CONFIG of the server "
        "names, and make it writable"
    )


def base_settings(config: str | None, promises: Mapping[str, Any]) -> Settings:
    return merge(over_promises(_words(config) if config else {}, promises), None, "")


def _words(path: str) -> dict[str, Any]:
    return check_words(read_file(path), where_is(path))
