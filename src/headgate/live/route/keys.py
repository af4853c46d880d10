"""API keys: names and SHA-256 digests in a file, never the keys themselves."""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from headgate.core.errors import InputError
from headgate.live.route.config import read_text

LINE = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})\s+(?P<digest>[0-9a-fA-F]{64})(?P<rest>(\s+\S+)*)\s*"
)
TOKENS = re.compile(r"tokens=([1-9][0-9]{0,14})")
LONGEST = 512  # characters of a key a client shows


@dataclass(frozen=True)
class Key:
    """Whose key it is; `choose` lets its requests name their class, `tokens` limits it by the minute."""

    name: str
    digest: bytes
    choose: bool = False
    tokens: int | None = None


class Keys:
    """All keys of a file; without a file every request is accepted under no name."""

    def __init__(self, keys: list[Key] | None) -> None:
        self._keys = None if keys is None else {key.digest: key for key in keys}

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens a minute by name, of keys that are limited."""
        return {key.name: key.tokens for key in (self._keys or {}).values() if key.tokens is not None}

    @property
    def required(self) -> bool:
        """Whether a request must show a key."""
        return self._keys is not None

    def find(self, authorization: str | None) -> Key | None:
        """The key of an `Authorization: Bearer ...` header, None for a wrong or missing one.

        The look-up is by digest, which tells an attacker nothing of the key; the digest found is compared in
        constant time.
        """
        scheme, _, shown = (authorization or "").partition(" ")
        shown = shown.strip()
        if scheme.lower() != "bearer" or not shown or len(shown) > LONGEST:
            return None
        digest = sha256(shown.encode("utf-8", "surrogateescape")).digest()
        key = (self._keys or {}).get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None


def read_keys(path: str | Path | None) -> Keys:
    """Lines of `NAME SHA256 [choose] [tokens=N]`, N a minute; `#` starts a comment."""
    if path is None:
        return Keys(None)
    keys: list[Key] = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        found = LINE.fullmatch(line)
        words = found["rest"].split() if found else []
        limits = [int(each[1]) for word in words if (each := TOKENS.fullmatch(word))]
        if found is None or len(words) != words.count("choose") + len(limits) or len(limits) > 1:
            raise InputError(
                f"key file {path}:{number}: write NAME SHA256 [choose] [tokens=N]; "
                "see headgate route --new-key"
            )
        tokens = limits[0] if limits else None
        keys.append(Key(found["name"], bytes.fromhex(found["digest"]), "choose" in words, tokens))
    if not keys:
        raise InputError(f"key file {path}: no keys in it; add a line with headgate route --new-key NAME")
    return Keys(keys)


def new_key(name: str) -> tuple[str, str]:
    """A fresh key and its line for the key file."""
    key = "hg-" + secrets.token_urlsafe(32)
    line = f"{name} {sha256(key.encode()).hexdigest()}"
    if not LINE.fullmatch(line):
        raise InputError(f"{name!r} is not a name; use letters, digits, . _ and -, at most 64")
    return key, line
