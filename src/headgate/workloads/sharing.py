"""What rows of a trace say about shared content: hash ids, parents in a conversation, prefixes, sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headgate.workloads.contents import PRIVATE, Contents, Piece, of_hashes
from headgate.workloads.text import BadFieldError, tokens, tokens_or_none

MOST_IDS = 1_000_000  # hash ids of one request


def checked_sharing(row: Mapping[str, object]) -> Mapping[str, object]:
    """The same, or a BadFieldError that names the column."""
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(id, int | str) for id in ids):
        raise BadFieldError("hash_ids is not a list of ids")
    if len(ids) > MOST_IDS:
        raise BadFieldError(f"hash_ids has {len(ids)} ids, more than {MOST_IDS}")
    for name in ("prefix", "session", "chat_id", "parent_chat_id"):
        if not isinstance(row.get(name, ""), int | str):
            raise BadFieldError(f"{name} is neither a number nor a name")
    if "cached" in row:
        row = {**row, "cached": tokens_or_none(row["cached"], "cached")}
    if "prefix" in row:
        return {**row, "prefix_tokens": tokens(row.get("prefix_tokens"), "prefix_tokens")}
    return row


def shared_contents(
    rows: Sequence[Mapping[str, object]], prompts: Sequence[int], outputs: Sequence[int], hashed: int
) -> Contents | None:
    """The contents of all requests; None: no row says anything about them."""
    if any("prefix" in row or "session" in row for row in rows):
        return _named(rows, prompts)
    ids: list[list[object]] = [row.get("hash_ids", []) for row in rows]  # type: ignore[misc]
    if not hashed or not any(ids):
        return None
    return of_hashes(*_continued(rows, ids, prompts, outputs, hashed), hashed)


def _named(rows: Sequence[Mapping[str, object]], prompts: Sequence[int]) -> Contents:
    """A prefix of so many tokens, then the session's own tokens, which its outputs continue."""
    keys: dict[tuple[str, object], int] = {}

    def pieces(row: Mapping[str, object], prompt: int) -> list[Piece]:
        made: list[Piece] = []
        if "prefix" in row:
            shared = min(prompt, int(str(row["prefix_tokens"])))
            made.append((keys.setdefault(("prefix", row["prefix"]), len(keys)), shared))
            prompt -= shared
        if "session" in row:
            return [*made, (keys.setdefault(("session", row["session"]), len(keys)), prompt)]
        return [*made, (PRIVATE, prompt)]

    return Contents.of(pieces(row, prompt) for row, prompt in zip(rows, prompts, strict=True))


def _continued(
    rows: Sequence[Mapping[str, object]],
    ids: Sequence[list[object]],
    prompts: Sequence[int],
    outputs: Sequence[int],
    block: int,
) -> tuple[list[list[object]], list[int]]:
    """Ids and the tokens they cover: a request whose next turn is known has that turn's ids for its output.

    Only where the turn's prompt holds the parent's prompt and output and begins with the parent's ids. Any
    other output has no ids, and the next turn's copy of it is a miss.
    """
    longer, spans = list(ids), list(prompts)
    chats = {row["chat_id"]: number for number, row in enumerate(rows) if "chat_id" in row}
    for number, row in enumerate(rows):
        parent = chats.get(row.get("parent_chat_id"))
        if parent is None or parent == number or spans[parent] != prompts[parent]:
            continue
        whole, full = prompts[parent] + outputs[parent], prompts[parent] // block
        turn = ids[number]
        if whole <= min(prompts[number], len(turn) * block) and turn[:full] == ids[parent][:full]:
            longer[parent], spans[parent] = turn[: -(-whole // block)], whole
    return longer, spans
