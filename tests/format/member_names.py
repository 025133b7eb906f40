"""The names of members of shard files, read back: which part of which tensor, or which value, a member is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

_SUFFIX = re.compile(r"@\[(?:(?P<value>value)(?:,(?P<rank>\d+))?|(?P<box>(?:\d+:\d+(?:,\d+:\d+)*)?))\](?:#\[(?P<run>\d+:\d+)\])?")


@dataclass(frozen=True, slots=True)
class MemberKey:
    """A parsed member name; `box` is None for a whole tensor or a value, `run` for a whole box."""

    name: str
    box: tuple[tuple[int, int], ...] | None = None
    run: tuple[int, int] | None = None
    is_value: bool = False
    rank: int | None = None


def parse_member_name(member: str) -> MemberKey:
    """Parse a member name; one without a suffix of the forms in `shard_file` is a whole tensor."""
    at = member.find("@[")
    match = _SUFFIX.fullmatch(member, at) if at >= 0 else None
    if match is None:
        return MemberKey(member)
    name = unquote(member[:at])
    if match["value"]:
        return MemberKey(name, is_value=True, rank=None if match["rank"] is None else int(match["rank"]))
    box = tuple(_interval(part) for part in match["box"].split(",") if part)
    return MemberKey(name, box, None if match["run"] is None else _interval(match["run"]))


def _interval(text: str) -> tuple[int, int]:
    begin, end = text.split(":")
    return int(begin), int(end)
