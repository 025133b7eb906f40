"""A reader of checkpoints written from docs/format.md alone: it imports nothing of the package, nor torch, nor safetensors.

It reads everything, as numpy arrays (dtypes that numpy lacks come as unsigned integers of their size), and checks no digests.
"""

import json
import struct
from pathlib import Path

import msgpack
import numpy as np

NUMPY = {"BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2", "U32": "<u4", "I32": "<i4"}
NUMPY |= {"F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8", "C64": "<c8"}  # and the kinds of F8_: u1


def ints(column):  # section 4.1
    width, count, data = column
    stored = np.frombuffer(data, "<" + width).astype(np.int64)
    return stored if len(stored) == count else np.repeat(stored, count)


def strings(column, decode=bytes.decode):  # section 4.2; of texts, unless told otherwise
    count, lengths, data = column
    ends = np.cumsum(ints(lengths)).tolist()
    stored = [decode(data[begin:end]) for begin, end in zip([0, *ends], ends, strict=False)]
    return stored if len(stored) == count else stored * count


def matrix(columns, count):  # section 4.3
    return np.stack([ints(column) for column in columns], axis=1) if columns else np.zeros((count, 0), np.int64)


def value(node):  # section 6
    if isinstance(node, list):
        return [value(item) for item in node]
    if not isinstance(node, dict):
        return node
    ((tag, body),) = node.items()
    if tag in ("dict", "OrderedDict", "Counter", "defaultdict"):  # a defaultdict's factory comes before its items
        return {value(key): value(item) for key, item in (body[1] if tag == "defaultdict" else body)}
    if tag in ("tuple", "set", "frozenset", "deque", "object"):  # the items and the value come last, after a length or a class
        return {"tuple": tuple, "set": set, "frozenset": frozenset}.get(tag, lambda parts: parts[-1])(value(body))
    if tag == "OrderedDict.attributes":
        return value({"dict": body[0]})
    if tag == "int":
        return int.from_bytes(body, "little", signed=True)
    if tag == "complex":
        return complex(*body)
    if tag == "numpy.ndarray":
        return np.frombuffer(body[2], body[0]).reshape(body[1])
    if tag == "numpy.scalar":
        return np.frombuffer(body[1], body[0])[0]
    return body  # numpy.str, numpy.bytes, and what needs torch: as it is written


def plain_file(path, packed):  # section 7.1
    data, out = path.read_bytes(), b""
    for begin, count, width, dtype, bits in packed:
        out, data = out + data[: begin - len(out)], data[begin - len(out) :]
        for _ in range(count):
            end = 8 + -(-width * bits // 8)
            (low, scale), codes, data = struct.unpack("<ff", data[:8]), data[8:end], data[end:]
            whole = np.array([(code >> shift) & (2**bits - 1) for code in codes for shift in range(0, 8, bits)], "<f4")[:width]
            elements = np.float32(low) + whole * np.float32(scale)
            out += elements.astype("<f4" if dtype == "F32" else "<f2").tobytes()  # bf16 is not read here
    return out + data


def read_rows(root, catalog, t, out):
    """Fill the array of tensor t, by its rows (section 9)."""
    tensors, rows, boxes, files = (catalog[name] for name in ("tensors", "rows", "boxes", "files"))
    ends = np.cumsum(ints(tensors["num_rows"]))
    offsets, lengths = matrix(boxes["offsets"], boxes["count"]), matrix(boxes["lengths"], boxes["count"])
    packed = (
        [msgpack.unpackb(one) for one in strings(files["packed"], bytes)]
        if "packed" in files
        else [()] * len(strings(files["key"]))
    )
    below = [
        f"{folder}/{key}" if folder else key
        for folder, key in zip(strings(files["checkpoint"]), strings(files["key"]), strict=True)
    ]
    keys, columns = below, [ints(rows[name]).tolist() for name in ("box", "start", "count", "file", "offset")]
    for row in range(int(ends[t - 1]) if t else 0, int(ends[t])):
        box, start, count, file, offset = (column[row] for column in columns)
        if packed[file]:
            run = np.frombuffer(plain_file(root / keys[file], packed[file]), "u1")[offset : offset + count * out.itemsize].view(
                out.dtype
            )
        else:
            with open(root / keys[file], "rb") as shard:
                shard.seek(offset)
                run = np.frombuffer(shard.read(count * out.itemsize), out.dtype)
        here = offsets[box, offsets.shape[1] - out.ndim :]  # tables are padded on the left
        size = tuple(lengths[box, lengths.shape[1] - out.ndim :])
        coordinates = np.unravel_index(np.arange(start, start + count), size) if out.ndim else ()
        out[tuple(c + o for c, o in zip(coordinates, here, strict=True))] = run if out.ndim else run[0]


def sections(root):
    outer = msgpack.unpackb((root / "catalog.msgpack").read_bytes())
    assert (outer["format"], outer["version"]) == ("reshard_ckpt.catalog", 2)
    catalog = {name: msgpack.unpackb(section["body"]) for name, section in outer["sections"].items()}
    assert set(catalog["info"]["critical"]) <= {"files.packed"}
    return catalog


def links(folder):
    """Optimizer, FQN, key and the parameter's tensor, for every tensor and value that is state (section 5.8)."""
    catalog, found = sections(Path(folder)), {}
    tensors = [*strings(catalog["tensors"]["name"]), None]
    for table in (catalog["tensors"], catalog["values"]):
        columns = (ints(table[field]) for field in ("optimizer", "key", "parameter"))
        for name, first, last, of in zip(strings(table["name"]), *columns, strict=True):
            parts = name.split(".")
            texts = (parts[:first], parts[first + 1 : len(parts) - last], parts[len(parts) - last :])
            found |= {name: (*map(".".join, texts), tensors[of - 1])} if last else {}
    return found


def read(folder):
    root = Path(folder)
    catalog = sections(root)
    table, found = catalog["tensors"], []
    names, dtypes = strings(table["name"]), strings(table["dtypes"])
    shapes, ndim, alias = matrix(table["shape"], len(names)), ints(table["ndim"]), ints(table["alias"])
    for t, dtype in enumerate(ints(table["dtype"])):
        found.append(np.zeros(tuple(shapes[t, shapes.shape[1] - ndim[t] :]), NUMPY.get(dtypes[dtype], "u1")))
        read_rows(root, catalog, alias[t] - 1 if alias[t] else t, found[t])
    saved, values = catalog["values"], {}
    inline, blobs = iter(strings(saved["data"], bytes)), iter(ints(saved["blobs"]).tolist())
    for name, kind, num_blobs in zip(strings(saved["name"]), ints(saved["kind"]), ints(saved["num_blobs"]), strict=True):
        parts = [found[next(blobs)].tobytes() for _ in range(num_blobs)] or [next(inline)]
        decoded = [value(msgpack.unpackb(part)) for part in parts]
        values[name] = decoded if kind == 1 else decoded[0]
    return {name: out for name, out, kind in zip(names, found, ints(table["kind"]), strict=True) if kind == 0}, values


def members(path):
    """Name, dtype, shape and first byte of each member of a shard file (section 7)."""
    data = Path(path).read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    table = json.loads(data[8 : 8 + length])
    found = ((name, m) for name, m in table.items() if name != "__metadata__")
    return {name: (m["dtype"], tuple(m["shape"]), 8 + length + m["data_offsets"][0]) for name, m in found}
