"""Catalogs read back exactly; any damage and any lie in one is refused before it can mislead; newer ones are met as promised."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given

from reshard_ckpt.core.catalog.model import BoxTable, Catalog, FileEntry, RowTable
from reshard_ckpt.core.catalog.packed import PackedRows
from reshard_ckpt.core.catalog.specs import CODES, Mesh, StateLink, ValueKind
from reshard_ckpt.errors import CorruptError, UnsupportedError
from reshard_ckpt.format.catalog import decode_catalog, encode_catalog
from tests.format.building import Run, Tensor, build, checkpoints, position_bytes
from tests.reliability.hostile import seal, unseal
from tests.tries import examples

TENSORS = [
    Tensor("a", "F32", (4, 6), position_bytes(0, 96), (Run((0, 0), (2, 6), 0, 12, 0), Run((2, 0), (2, 6), 0, 12, 1))),
    Tensor("b", "BF16", (5,), position_bytes(1, 10), (Run((0,), (5,), 0, 3, 0), Run((0,), (5,), 3, 2, 1))),
    Tensor("c", "BF16", (5,), position_bytes(1, 10), alias_of="b"),
    Tensor("d", "I64", (), position_bytes(2, 8), (Run((), (), 0, 1, 1),)),
    Tensor("e", "U8", (0, 3)),
]
SAMPLE = build(TENSORS, num_files=2, values={"extra.step": 7, "extra.text": "é"}, per_rank=["own", None]).catalog
ENCODED = encode_catalog(SAMPLE)


def assert_same(a: Any, b: Any) -> None:
    """Equal through and through, arrays and their dtypes included."""
    assert type(a) is type(b)
    if dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert_same(getattr(a, field.name), getattr(b, field.name))
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.array_equal(a, b)
    else:
        assert a == b


@examples(200)
@given(built=checkpoints())
def test_catalogs_read_back_exactly(built):
    encoded = encode_catalog(built.catalog)
    decoded = decode_catalog(encoded)
    assert_same(decoded, built.catalog)
    assert encode_catalog(decoded) == encoded
    assert_same(decode_catalog(memoryview(encoded)), built.catalog)


def test_an_empty_catalog_reads_back():
    catalog = dataclasses.replace(build([]).catalog, mesh=None, files=(), placements=())
    assert_same(decode_catalog(encode_catalog(catalog)), catalog)


def test_a_shard_takes_few_bytes():
    num_tensors, num_ranks = 100, 500
    tensors = num_tensors * num_ranks
    rank = np.tile(np.arange(num_ranks), num_tensors)
    table = dataclasses.replace(
        build([Tensor(f"layers.{i:04d}.weight", "F32", (num_ranks * 7, 1000)) for i in range(num_tensors)]).catalog.tensors_table,
        row_start=np.arange(num_tensors + 1) * num_ranks,
    )
    offsets = np.stack([np.arange(num_ranks) * 7, np.zeros(num_ranks, np.int64)], axis=1)
    catalog = dataclasses.replace(
        build([]).catalog,
        tensors_table=table,
        boxes=BoxTable(offsets, np.tile([7, 1000], (num_ranks, 1))),
        rows=RowTable(
            rank,
            np.zeros(tensors, np.int64),
            np.full(tensors, 7000),
            rank,
            np.repeat(np.arange(num_tensors) * 28000 + 2**33, num_ranks),
        ),
        files=tuple(FileEntry(f"s/{r}", 2**34, f"s/{r}.d", bytes(16), "s", r) for r in range(num_ranks)),
    )
    encoded = encode_catalog(catalog)
    assert_same(decode_catalog(encoded), catalog)
    assert len(encoded) / tensors < 20


# --- damage ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_no_changed_byte_goes_unseen(mask: int):
    for at in range(len(ENCODED)):
        damaged = bytearray(ENCODED)
        damaged[at] ^= mask
        with pytest.raises(CorruptError):
            decode_catalog(bytes(damaged))


def test_no_truncation_goes_unseen():
    for size in range(len(ENCODED)):
        with pytest.raises(CorruptError):
            decode_catalog(ENCODED[:size])
    with pytest.raises(CorruptError):
        decode_catalog(ENCODED + b"\0")


def with_fields(section: str, **fields: Any) -> bytes:
    envelope, bodies = unseal(ENCODED)
    return seal(envelope, {**bodies, section: msgpack.packb({**msgpack.unpackb(bodies[section]), **fields})})


def test_small_catalogs_cannot_claim_much_memory():
    many = 10**9
    claims = [
        with_fields("rows", **{name: ["u1", many, b"\0"] for name in ("box", "start", "count", "file", "offset")}),
        with_fields("boxes", count=many, offsets=[["u1", many, b"\0"]] * 2, lengths=[["u1", many, b"\1"]] * 2),
        with_fields("boxes", count=many, offsets=[], lengths=[]),
        with_fields("tensors", name=[many, ["u1", 1, b"\1"], b"a"]),
        with_fields("tensors", name=[7, ["u8", 7, (2**63 - 1).to_bytes(8, "little")], b"a"]),
        with_fields("tensors", num_rows=["u8", 7, (2**62).to_bytes(8, "little")]),
        with_fields("placements", num_coords=["u8", 4, (2**62).to_bytes(8, "little")]),
        msgpack.packb({"format": "x"})[:-2] + b"\xdd\xff\xff\xff\xff" * 1000,
    ]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for replication in claims:
        with pytest.raises(CorruptError):
            decode_catalog(replication)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024


# --- lies ----------------------------------------------------------------------------------------------------


def altered(table: str, **columns: Any) -> Catalog:
    if not table:
        return dataclasses.replace(SAMPLE, **columns)
    return dataclasses.replace(SAMPLE, **{table: dataclasses.replace(getattr(SAMPLE, table), **columns)})


def at(array: np.ndarray, index: Any, value: int) -> np.ndarray:
    out = array.copy()
    out[index] = value
    return out


def file(**changes: Any) -> Catalog:
    return altered("", files=(dataclasses.replace(SAMPLE.files[0], **changes), *SAMPLE.files[1:]))


def value(**changes: Any) -> Catalog:
    return altered("", values_table=(dataclasses.replace(SAMPLE.values_table[0], **changes), *SAMPLE.values_table[1:]))


T, R, B = SAMPLE.tensors_table, SAMPLE.rows, SAMPLE.boxes
BOX_OF_A = int(R.box[0])
LIES: dict[str, tuple[Callable[[], Catalog], str]] = {
    "save id": (lambda: altered("", save_id="../x"), "save id"),
    "time": (lambda: altered("", created_s=float("nan")), "time of creation"),
    "mesh axes": (lambda: altered("", mesh=Mesh(("dp", "dp"), (2, 3))), "mesh"),
    "mesh sizes": (lambda: altered("", mesh=Mesh(("dp",), (0,))), "mesh"),
    "file absolute": (lambda: file(key="/etc/passwd"), "no paths below"),
    "file above": (lambda: file(key="a/../../b"), "no paths below"),
    "file backslash": (lambda: file(digests_key="a\\b"), "no paths below"),
    "file NUL": (lambda: file(key="a\0b"), "no paths below"),
    "file of another checkpoint": (lambda: file(checkpoint="../other"), "no paths below"),
    "file twice": (lambda: file(key=SAMPLE.files[1].key), "1 different keys"),
    "file digest": (lambda: file(digest=b"x"), "digest of 1 bytes"),
    "file without digests": (lambda: file(digests_key=""), "digest of 16 bytes"),
    "file elsewhere": (lambda: file(checkpoint="/other"), "not a relative path"),
    "file elsewhere hidden": (lambda: file(checkpoint="../a/../b"), "not a relative path"),
    "file size": (lambda: file(size=2**62 + 1), "bytes and rank"),
    "file short": (lambda: file(size=SAMPLE.files[0].size - 1), "which has"),
    "names in disorder": (lambda: altered("tensors_table", names=(T.names[1], T.names[0], *T.names[2:])), "not in order"),
    "name twice": (lambda: altered("tensors_table", names=(T.names[0], T.names[0], *T.names[2:])), "not in order"),
    "dtype": (lambda: altered("tensors_table", dtype=at(T.dtype, 0, len(CODES))), "its dtype is"),
    "kind": (lambda: altered("tensors_table", kind=at(T.kind, 0, 2)), "its kind is"),
    "kind of a tensor": (lambda: altered("tensors_table", kind=at(T.kind, 0, 1)), "not a run of U8"),
    "ndim": (lambda: altered("tensors_table", ndim=at(T.ndim, 0, 3)), "number of dims is 3"),
    "padding": (lambda: altered("tensors_table", ndim=at(T.ndim, 0, 1)), "not padded"),
    "shape overflow": (lambda: altered("tensors_table", shape=at(T.shape, 0, 2**40)), "over"),
    "shape empty overflow": (lambda: altered("tensors_table", shape=at(T.shape, (4, 1), 2**63 - 1)), "over"),
    "alias out of range": (lambda: altered("tensors_table", alias=at(T.alias, 2, 99)), "its alias is 99"),
    "alias of itself": (lambda: altered("tensors_table", alias=at(T.alias, 2, 2)), "an alias too"),
    "alias of another shape": (lambda: altered("tensors_table", alias=at(T.alias, 2, 0)), "another shape"),
    "alias with rows": (lambda: altered("tensors_table", row_start=at(T.row_start, 2, T.row_start[1])), "rows of its own"),
    "placement": (lambda: altered("tensors_table", placement=at(T.placement, 0, 2)), "its placement is 2"),
    "row index": (lambda: altered("tensors_table", row_start=at(T.row_start, -1, 99)), "row index"),
    "row index falls": (lambda: altered("tensors_table", row_start=at(T.row_start, 1, 5)), "row index"),
    "row columns": (lambda: altered("rows", offset=R.offset[:-1]), "columns of the rows have"),
    "box index": (lambda: altered("rows", box=at(R.box, 0, 99)), "of box 99"),
    "file index": (lambda: altered("rows", file=at(R.file, 0, 2)), "of file 2"),
    "box outside": (lambda: altered("boxes", offsets=at(B.offsets, (BOX_OF_A, 0), 3)), "not within its shape"),
    "box overflow": (lambda: altered("boxes", lengths=at(B.lengths, BOX_OF_A, 2**40)), "elements"),
    "box offset overflow": (lambda: altered("boxes", offsets=at(B.offsets, BOX_OF_A, 2**63 - 1)), "offset of"),
    "run past its box": (lambda: altered("rows", start=at(R.start, 0, 1)), "is the run of"),
    "run overflow": (lambda: altered("rows", start=at(R.start, 0, 2**63 - 1)), "is the run of"),
    "run too long": (lambda: altered("rows", count=at(R.count, 0, 2**63 - 1)), "is the run of"),
    "run without elements": (lambda: altered("rows", count=at(R.count, 0, 0)), "no elements"),
    "offset past the end": (lambda: altered("rows", offset=at(R.offset, 0, 2**63 - 1)), "which has"),
    "value twice": (lambda: value(name="extra.text"), "name of a value occurs twice"),
    "value and tensor": (lambda: value(name="a"), "a tensor and a value"),
    "value nowhere": (lambda: value(data=None), "no bytes here"),
    "value in two places": (lambda: value(blobs=(5,)), "bytes here, and 1 blobs"),
    "value in a tensor": (lambda: value(data=None, blobs=(0,)), "not blobs of the catalog"),
    "value in many": (lambda: value(data=None, blobs=(5, 6)), "2 blobs"),
    "packed rows past the end": (lambda: file(packed=(PackedRows(0, 2**40, 9, "F32", 8),)), "packed rows that overlap, or lie"),
    "packed rows that overlap": (lambda: file(packed=(PackedRows(0, 1, 9, "F32", 8),) * 2), "packed rows that overlap, or lie"),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_found_and_cannot_be_written(lie: str):
    make, message = LIES[lie]
    with pytest.raises(UnsupportedError, match=message):
        encode_catalog(make())


LINKED = build(
    [
        Tensor("model.a", "U8", (1,), b"a", (Run((0,), (1,), 0, 1, 0),)),
        Tensor(
            "o.p.state.state.w.m.n",
            "U8",
            (1,),
            b"b",
            (Run((0,), (1,), 0, 1, 0),),
            link=StateLink("o.p", "state.w", "m.n", "model.a"),
        ),
    ],
    values={"o.p.state.state.w.step": 1},
    per_rank=[0],
).catalog
BLOB, PLAIN, STATE = (
    next(i for i, name in enumerate(LINKED.tensors_table.names) if name.startswith(begin)) for begin in ("extra", "model", "o.p")
)


def relinked(tensor: int, **columns: int) -> Catalog:
    table = LINKED.tensors_table
    changed = {name: at(getattr(table, name), tensor, value) for name, value in columns.items()}
    return dataclasses.replace(LINKED, tensors_table=dataclasses.replace(table, **changed))


def test_links_read_back():
    link = StateLink("o.p", "state.w", "step", "model.a")
    value = dataclasses.replace(LINKED.values_table[0], link=link)
    catalog = dataclasses.replace(LINKED, values_table=(value, *LINKED.values_table[1:]))
    decoded = decode_catalog(encode_catalog(catalog))
    assert decoded.links() == {
        "o.p.state.state.w.m.n": StateLink("o.p", "state.w", "m.n", "model.a"),
        "o.p.state.state.w.step": link,
    }


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ((PLAIN, {"optimizer": 0, "key": 1}), "model.a: does not divide"),
        ((STATE, {"optimizer": 1}), "does not divide"),
        ((STATE, {"key": 4}), "does not divide"),
        ((STATE, {"key": 2**62}), "does not divide"),
        ((STATE, {"optimizer": 2**62}), "does not divide"),
        ((STATE, {"key": -1}), "is linked by 2 and -1 parts"),
        ((STATE, {"optimizer": -1}), "is linked by -1"),
        ((STATE, {"parameter": 3}), "to tensor 3"),
        ((STATE, {"parameter": BLOB}), "has state of an optimizer, but holds a value"),
        ((STATE, {"key": 0}), "no key of state"),
        ((PLAIN, {"parameter": 0}), "no key of state"),
    ],
)
def test_a_link_that_its_name_does_not_show_is_refused(lie: tuple[int, dict[str, int]], message: str):
    with pytest.raises(UnsupportedError, match=message):
        encode_catalog(relinked(lie[0], **lie[1]))


def test_links_of_values_are_checked_as_those_of_tensors():
    for fields in ({"key": ["u1", 2, b"\x09"]}, {"parameter": ["u1", 2, b"\x63"], "key": ["u1", 2, b"\x01"]}):
        envelope, bodies = unseal(encode_catalog(LINKED))
        body = msgpack.packb({**msgpack.unpackb(bodies["values"]), **fields})
        with pytest.raises(CorruptError, match="values: .*(does not divide|to tensor 98)"):
            decode_catalog(seal(envelope, {**bodies, "values": body}))


def test_files_that_nothing_proves_are_refused():
    data = encode_catalog(file(digests_key="", digest=b""))
    with pytest.raises(CorruptError, match="has no digests"):
        decode_catalog(data)


def test_packed_rows_read_back_and_nonsense_is_refused():
    data = encode_catalog(packed := file(packed=(PackedRows(0, 1, 9, "F32", 8),)))
    assert_same(decode_catalog(data), packed)
    envelope, bodies = unseal(data)
    fields = msgpack.unpackb(bodies["files"])
    for nonsense in ([[0, 1, 9, "F32", 3]], [[0, 1, 9, "F32"]], [[0.0, 1, 9, "F32", 8]], [[0, 1, 9, "I8", 8]], 7):
        one = msgpack.packb(nonsense)
        lengths = [len(one), *[0] * (len(packed.files) - 1)]
        column = [len(lengths), ["u1", len(lengths), bytes(lengths)], one]
        body = msgpack.packb({**fields, "packed": column})
        with pytest.raises(CorruptError, match="files.packed is not a list of packed rows"):
            decode_catalog(seal(envelope, {**bodies, "files": body}))


def test_names_that_are_no_text_cannot_be_written():
    with pytest.raises(UnsupportedError, match="lone surrogate"):
        encode_catalog(altered("", mesh=Mesh(("\ud800",), (2,))))
    with pytest.raises(UnsupportedError, match="lone surrogate"):
        encode_catalog(altered("tensors_table", names=(*T.names[:-1], "\ud800")))


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("tensors", {"dtype": ["u1", 7, b"\x63"]}, "tensors.dtype is 99"),
        ("tensors", {"dtypes": [1, ["u1", 1, b"\2"], b"F4"], "dtype": ["u1", 7, b"\0"]}, "'F4'.*newer version"),
        ("values", {"kind": ["u1", 3, b"\x09"]}, r"values.kind holds \[9\].*newer version"),
        ("values", {"inline": ["u1", 3, b"\x02\0\0"]}, "neither 0 nor 1"),
        ("rows", {"start": ["u1", 1, b"\0"]}, "rows.start has 1 entries, not 6|rows.start has 1 entries, not 7"),
        ("rows", {"start": ["u8", 7, b"\xff" * 8]}, "over 2⁶³ - 1|entries"),
        ("files", {"key": [2, ["u1", 2, b"\1\1"], b"\xff\xff"]}, "not UTF-8"),
        ("files", {"key": [2, ["u4", 1, (70_000).to_bytes(4, "little")], b"a" * 70_000]}, "over the 65536"),
        ("info", {"mesh": 5}, "info.mesh is not a dict"),
        ("info", {"mesh": {"axes": [1], "sizes": [1]}}, "names and sizes"),
        ("info", {"created_s": 5}, "created_s is not a float"),
        ("info", {"folder": 5}, "folder is not a str"),
    ],
)
def test_fields_that_cannot_be_are_named(section: str, fields: dict[str, Any], message: str):
    with pytest.raises(CorruptError, match=message):
        decode_catalog(with_fields(section, **fields))


def test_a_section_cannot_stand_for_another():
    envelope = msgpack.unpackb(ENCODED)
    sections = envelope["sections"]
    sections["boxes"], sections["rows"] = sections["rows"], sections["boxes"]
    with pytest.raises(CorruptError, match="does not match its digest"):
        decode_catalog(msgpack.packb(envelope))


@pytest.mark.parametrize("section", sorted(unseal(ENCODED)[1]))
def test_every_section_and_field_is_required(section: str):
    envelope, bodies = unseal(ENCODED)
    with pytest.raises(CorruptError, match=f"section {section} is missing"):
        decode_catalog(seal(envelope, {name: body for name, body in bodies.items() if name != section}))
    fields = msgpack.unpackb(bodies[section])
    for field in fields:
        without = msgpack.packb({name: column for name, column in fields.items() if name != field})
        with pytest.raises(CorruptError, match=rf"{section}\.{field} is missing"):
            decode_catalog(seal(envelope, {**bodies, section: without}))


# --- newer versions ----------------------------------------------------------------------------------------------------


def test_what_a_newer_version_adds_is_passed_over():
    envelope, bodies = unseal(ENCODED)
    bodies = {**bodies, "bloom": b"not even msgpack \xc1"}
    bodies["rows"] = msgpack.packb({**msgpack.unpackb(bodies["rows"]), "heat": ["u1", 0, b""]})
    assert_same(decode_catalog(seal({**envelope, "note": "x"}, bodies)), SAMPLE)


@pytest.mark.parametrize("item", ["bloom", "rows.heat", "values.name.x", 5, "\n"])
def test_what_a_newer_version_calls_critical_is_refused(item: object):
    with pytest.raises(CorruptError, match="written by a newer version"):
        decode_catalog(with_fields("info", critical=["rows", "rows.box", item]))


def test_what_is_critical_and_known_is_read():
    assert_same(decode_catalog(with_fields("info", critical=["rows", "rows.box"])), SAMPLE)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 3}, "version 3, written by a newer version"),
        ({"version": 0}, "its version is 0"),
        ({"version": 1}, "its version is 1, and this library reads 2"),
        ({"version": "1"}, "its version is '1'"),
        ({"format": "safetensors"}, "its format is 'safetensors'"),
        ({"sections": []}, "no sections"),
    ],
)
def test_envelopes_of_other_files_are_named(change: dict[str, Any], message: str):
    with pytest.raises(CorruptError, match=message):
        decode_catalog(msgpack.packb({**msgpack.unpackb(ENCODED), **change}))


def test_per_rank_values_lead_to_their_blobs():
    catalog = decode_catalog(ENCODED)
    own = next(value for value in catalog.values_table if value.kind is ValueKind.PER_RANK)
    assert [catalog.tensors_table.names[blob] for blob in own.blobs] == ["extra.own@[value,0]", "extra.own@[value,1]"]
    assert catalog.names == ("a", "b", "c", "d", "e")
