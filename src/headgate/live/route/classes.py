"""Whose request it is, and of which class. Keys are kept as SHA-256 digests, never themselves."""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pydantic import ValidationError

from headgate.core.errors import InputError
from headgate.live.route.config import Addresses, Class, GateConfig, Match, read_text

# -- API keys

LINE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})\s+(?P<digest>[0-9a-fA-F]{64})(?P<rest>(\s+\S+)*)\s*"
)
WORD = re.compile(r"(?P<name>tokens|inflight|requests|queue)=(?P<value>[0-9]{1,15}(?:\.[0-9]{1,6})?)")
LONGEST = 512  # characters of a key a client shows
LONGEST_TENANT = 64  # characters of a tenant that a header names
NO_LIMITS = Addresses()


@dataclass(frozen=True)
class Key:
    """`choose`: its requests name their class, and their tenant where a header may."""

    name: str
    digest: bytes
    choose: bool = False
    limits: Addresses = NO_LIMITS


class Keys:
    def __init__(self, keys: list[Key] | None) -> None:
        self._keys = None if keys is None else {key.digest: key for key in keys}

    @property
    def all(self) -> list[Key]:
        return [*(self._keys or {}).values()]

    @property
    def names(self) -> set[str]:
        return {key.name for key in self.all}

    @property
    def required(self) -> bool:
        return self._keys is not None

    def find(self, authorization: str | None) -> Key | None:
        """Found by digest, which tells an attacker nothing of the key, and compared in constant time."""
        scheme, _, shown = (authorization or "").partition(" ")
        shown = shown.strip()
        if scheme.lower() != "bearer" or not shown or len(shown) > LONGEST:
            return None
        digest = sha256(shown.encode("utf-8", "surrogateescape")).digest()
        key = (self._keys or {}).get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None


def read_keys(path: str | Path | None) -> Keys:
    if path is None:
        return Keys(None)
    keys: list[Key] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        parts = LINE.fullmatch(line)
        words = parts["rest"].split() if parts else []
        limits = _limits([word for word in words if word != "choose"])
        if parts is None or limits is None:
            raise InputError(
                f"key file {path}:{number}: write NAME SHA256 [choose] [tokens=N] [requests=N] [inflight=N] "
                "[queue=SHARE]; see headgate route --new-key"
            )
        keys.append(Key(parts["name"], bytes.fromhex(parts["digest"]), "choose" in words, limits))
    if not keys:
        raise InputError(f"key file {path}: no keys in it; add a line with headgate route --new-key NAME")
    return Keys(keys)


def _limits(words: list[str]) -> Addresses | None:
    """Each word once; None where they do not limit a key."""
    found = {match["name"]: match["value"] for word in words if (match := WORD.fullmatch(word))}
    numbers = {name: int(text) if text.isdigit() else float(text) for name, text in found.items()}
    try:
        return Addresses.model_validate(numbers) if len(found) == len(words) else None
    except ValidationError:
        return None


def tenant_of(key: Key | None, keyed: bool, shown: Sequence[str]) -> str:
    """Its key's name, or the header's word: for keys that may choose, and without keys. Two say nothing."""
    own = "" if key is None else key.name
    if len(shown) != 1 or (keyed and not (key is not None and key.choose)):
        return own
    named = shown[0].strip()
    return named if 0 < len(named) <= LONGEST_TENANT and named.isprintable() else own


def new_key(name: str) -> tuple[str, str]:
    key = "hg-" + secrets.token_urlsafe(32)
    line = f"{name} {sha256(key.encode()).hexdigest()}"
    if not LINE.fullmatch(line):
        raise InputError(f"{name!r} is not a name; use letters, digits, . _ and -, at most 64")
    return key, line


# -- classes: their number is bounded by the file

UNMATCHED = 5  # the rank of a class without rules
Traits = tuple[Key | None, str | None, str, str | None, int]


class Classes:
    """A rule by key comes before one by header, header before model, body field, prompt length; within these
    the order of the file counts. What the client itself says, header and field, counts only for keys that may
    choose, or without keys.
    """

    def __init__(self, config: GateConfig, keyed: bool = False) -> None:
        self.default, self._keyed = config.default.name, keyed
        rules = [rule for rule in config.classes if _rank(rule.match) < UNMATCHED]
        self._rules = sorted(rules, key=lambda rule: _rank(rule.match))
        self.by_name: dict[str, Class] = {each.name: each for each in (*config.classes, config.default)}

    @property
    def names(self) -> Sequence[str]:
        return tuple(self.by_name)

    def of(self, key: Key | None, header: str | None, model: str, field: str | None, prompt: int) -> Class:
        if self._keyed and not (key is not None and key.choose):
            header = field = None
        traits: Traits = key, header, model, field, prompt
        return next((rule for rule in self._rules if _fits(rule.match, traits)), self.by_name[self.default])


def _rank(match: Match) -> int:
    given = (match.key or None, match.header, match.model or None, match.field, match.prompt)
    return next((rank for rank, value in enumerate(given) if value is not None), UNMATCHED)


def _fits(match: Match, traits: Traits) -> bool:
    key, header, model, field, prompt = traits
    if match.key and (key is None or key.name not in _listed(match.key)):
        return False
    if match.header is not None and match.header != header:
        return False
    if match.model and model not in _listed(match.model):
        return False
    if match.field is not None and match.field != field:
        return False
    return match.prompt is None or match.prompt[0] <= prompt < match.prompt[1]


def _listed(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names
