"""Files of an attacker who knows the format: right checksums, right sizes and wrong contents.

`mutated_catalog` changes a real catalog field by field and seals it again, so that no checksum stops it at the door.
"""

from __future__ import annotations

import random
from typing import Any

import msgpack

from reshard_ckpt.format.catalog import section_digest

EDGES = (0, 1, 2, 7, 255, 256, 2**15, 2**31 - 1, 2**31, 2**32, 2**40, 2**61, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1)
WIDTHS = {"u1": 1, "u2": 2, "u4": 4, "u8": 8}
TEXTS = (
    "",
    ".",
    "..",
    "/",
    "/etc/passwd",
    "../../x",
    "a/../b",
    "a\\b",
    "a\0b",
    "s/a",
    "x" * 2000,
    "é",
    "\ud7ff",
    "F32",
    "shard",
    "w",
)


def unseal(data: bytes) -> tuple[dict[str, Any], dict[str, bytes]]:
    """The envelope of a catalog, and the bodies of its sections."""
    envelope = msgpack.unpackb(data)
    return envelope, {name: section["body"] for name, section in envelope["sections"].items()}


def seal(envelope: dict[str, Any], bodies: dict[str, bytes]) -> bytes:
    """A catalog whose digests are right, whatever its bodies say."""
    sections = {name: {"digest": section_digest(name, body), "body": body} for name, body in bodies.items()}
    return bytes(msgpack.packb({**envelope, "sections": sections}))


def mutated_catalog(data: bytes, chance: random.Random) -> bytes:
    """Another catalog, with a few fields changed and all digests right."""
    envelope, bodies = unseal(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        name = chance.choice(sorted(bodies))
        if chance.random() < 0.1:
            bodies[name] = mutated_bytes(bodies[name], chance)
            continue
        try:
            fields = msgpack.unpackb(bodies[name])
        except Exception:
            continue  # an earlier change has made nonsense of it
        if not isinstance(fields, dict) or not fields:
            continue
        field = chance.choice(sorted(fields, key=str))
        fields[field] = mutated_node(fields[field], chance, fields)
        bodies[name] = msgpack.packb(fields)
    return seal(envelope, bodies)


def mutated_bytes(data: bytes, chance: random.Random) -> bytes:
    """Some bytes changed, cut out or put in."""
    out = bytearray(data)
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(out) + 1)
        out[at : at + chance.randrange(9)] = chance.randbytes(chance.randrange(9))
    return bytes(out)


def mutated_node(node: Any, chance: random.Random, fields: dict[str, Any]) -> Any:
    """Something like a field, but not the same."""
    if is_ints(node):
        return mutated_column(node, chance)
    if isinstance(node, list) and [type(part) for part in node] == [int, list, bytes]:
        return mutated_texts(node, chance)
    if isinstance(node, list) and node and chance.random() < 0.8:
        at = chance.randrange(len(node))
        change = chance.randrange(4)
        if change == 0:
            return [*node[:at], *node[at + 1 :]]
        if change == 1:
            return [*node[:at], node[at], *node[at:]]
        return [*node[:at], mutated_node(node[at], chance, fields), *node[at + 1 :]]
    if isinstance(node, bytes) and chance.random() < 0.7:
        return mutated_bytes(node, chance)
    if isinstance(node, int) and not isinstance(node, bool) and chance.random() < 0.7:
        return chance.choice(EDGES)
    return chance.choice(
        [None, True, -1, 0.5, float("nan"), "", b"", [], {}, fields[chance.choice(sorted(fields, key=str))], nested(80)]
    )


def is_ints(node: Any) -> bool:
    return isinstance(node, list) and [type(part) for part in node] == [str, int, bytes] and node[0] in WIDTHS


def mutated_column(node: list[Any], chance: random.Random) -> list[Any]:
    """A column of integers with another count, width or entry; often one that is a column still."""
    width, count, data = node
    change = chance.randrange(6)
    if change == 0:
        return [width, chance.choice([*EDGES, count + 1, max(count - 1, 0)]), data]
    if change == 1:
        return [chance.choice(sorted(WIDTHS)), count, data]
    if change == 2:  # one entry for all
        value = chance.choice(EDGES) % 256 ** WIDTHS[width]
        return [width, count, value.to_bytes(WIDTHS[width], "little")]
    each = WIDTHS[width]
    values = [int.from_bytes(data[at : at + each], "little") for at in range(0, len(data), each)] or [0]
    if len(values) == 1:
        values *= min(count, 64) or 1
    at = chance.randrange(len(values))
    values[at] = chance.choice([*EDGES, values[at] + 1, max(values[at] - 1, 0), chance.choice(values)]) % 2**64
    return ["u8", len(values), b"".join(value.to_bytes(8, "little") for value in values)]


def mutated_texts(node: list[Any], chance: random.Random) -> list[Any]:
    """A column of strings, one of them another."""
    count, lengths, data = node
    if chance.random() < 0.3:
        return [chance.choice([*EDGES, count]), mutated_column(lengths, chance) if is_ints(lengths) else lengths, data]
    texts = [chance.choice(TEXTS).encode("utf-8", "surrogatepass") for _ in range(min(count, 64))]
    if chance.random() < 0.5:
        texts = [chance.choice([data[:9], text]) for text in texts]
    packed = b"".join(len(text).to_bytes(8, "little") for text in texts)
    return [len(texts), ["u8", len(texts), packed], b"".join(texts)]


def nested(depth: int) -> Any:
    node: Any = 1
    for _ in range(depth):
        node = [node]
    return node
