"""A double of Google Cloud Storage: the part of its XML interface that obstore uses, with objects in the memory of this process.

Written from Google's reference of the XML API: each object has a generation, a new one for each write; a PUT with
``x-goog-if-generation-match`` is refused by 412 unless the object has this generation, 0 for no object. It also has uploads in
parts, listings in pages and with a delimiter, ranges, metadata, and copies, which it may ignore (`GcsDouble.ignores_copies`). It
checks no signature, and has each bucket that is named.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

PAGE = 10
"""Entries of one page of a listing: few, so that tests meet several pages."""


@dataclass
class StoredObject:
    data: bytes
    generation: int
    metadata: Mapping[str, str]

    @property
    def headers(self) -> dict[str, str]:
        digest = hashlib.md5(self.data).hexdigest()
        return {
            "ETag": f'"{digest}"',
            "x-goog-generation": str(self.generation),
            "Last-Modified": formatdate(usegmt=True),
            **self.metadata,
        }


@dataclass
class GcsDouble:
    """The objects of all buckets by their paths, and uploads that are not complete."""

    objects: dict[str, StoredObject] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    metadata: dict[str, Mapping[str, str]] = field(default_factory=dict)  # the headers of each upload
    generations: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    lock: threading.Lock = field(default_factory=threading.Lock)
    ignores_copies: bool = False

    def put(self, path: str, data: bytes, headers: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        held, wanted = self.objects.get(path), headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (held.generation if held else 0):
            return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
        metadata = {name: value for name, value in headers.items() if name.startswith("x-goog-meta-")}
        self.objects[path] = StoredObject(data, next(self.generations), metadata)
        return 200, self.objects[path].headers, b""

    def get(self, path: str, span: str | None) -> tuple[int, dict[str, str], bytes]:
        held = self.objects.get(path)
        if held is None:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        if span is None:
            return 200, held.headers, held.data
        first, _, last = span.removeprefix("bytes=").partition("-")
        data = held.data[int(first) : int(last) + 1 if last else None]
        if not data:
            return 416, {}, b"<Error><Code>InvalidRange</Code></Error>"
        place = f"bytes {first}-{int(first) + len(data) - 1}/{len(held.data)}"
        return 206, {**held.headers, "Content-Range": place}, data

    def list(self, bucket: str, query: Mapping[str, str]) -> tuple[int, dict[str, str], bytes]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        found: dict[str, StoredObject | None] = {}  # None for a common prefix
        for path in sorted(self.objects):
            key = path.removeprefix(f"{bucket}/")
            if path == key or not key.startswith(prefix):
                continue
            head, cut, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            found[prefix + head + cut if cut else key] = None if cut else self.objects[path]
        names = [name for name in found if name > after]
        rows = []
        for name in names[:PAGE]:
            held = found[name]
            if held is None:
                rows.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
            else:
                rows.append(
                    f"<Contents><Key>{escape(name)}</Key><Size>{len(held.data)}</Size><ETag>{held.headers['ETag']}</ETag>"
                    f"<Generation>{held.generation}</Generation><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
        more = names[PAGE:] and f"<NextContinuationToken>{escape(names[PAGE - 1])}</NextContinuationToken>"
        return 200, {}, f"<ListBucketResult>{''.join(rows)}{more or ''}</ListBucketResult>".encode()

    def upload(
        self, method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        if "uploads" in query:
            name = uuid.uuid4().hex
            self.uploads[name], self.metadata[name] = {}, headers
            result = f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId></InitiateMultipartUploadResult>"
            return 200, {}, result.encode()
        name = query["uploadId"]
        if name not in self.uploads:
            return 404, {}, b"<Error><Code>NoSuchUpload</Code></Error>"
        if method == "PUT":
            self.uploads[name][int(query["partNumber"])] = body
            return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""
        parts = self.uploads.pop(name)
        if method == "DELETE":
            return 204, {}, b""
        _, made, _ = self.put(path, b"".join(parts[number] for number in sorted(parts)), self.metadata[name])
        result = f"<CompleteMultipartUploadResult><ETag>{escape(made['ETag'])}</ETag></CompleteMultipartUploadResult>"
        return 200, {"x-goog-generation": made["x-goog-generation"]}, result.encode()

    def answer(self, method: str, url: str, headers: Mapping[str, str], body: bytes) -> tuple[int, dict[str, str], bytes]:
        place = urlsplit(url)
        path = unquote(place.path).lstrip("/")
        query = {name: values[0] for name, values in parse_qs(place.query, keep_blank_values=True).items()}
        if "uploads" in query or "uploadId" in query:
            return self.upload(method, path, query, headers, body)
        if method == "PUT":
            named = "" if self.ignores_copies else unquote(headers.get("x-goog-copy-source", ""))
            copied = self.objects.get(named)
            return self.put(path, copied.data if copied else body, headers)
        if method == "DELETE":
            return (204, {}, b"") if self.objects.pop(path, None) else (404, {}, b"<Error><Code>NoSuchKey</Code></Error>")
        if "list-type" in query:
            return self.list(path.rstrip("/"), query)
        return self.get(path, headers.get("range"))


@contextmanager
def gcs_server() -> Iterator[tuple[str, GcsDouble]]:
    """Run the double in threads of this process; yield its endpoint, and the double."""
    double = GcsDouble()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        timeout = 60  # of a connection that is idle: each has a thread

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with double.lock:
                status, headers, data = double.answer(
                    self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, body
                )
            self.send_response_only(status)
            for name, value in headers.items():
                self.send_header(name, value)
            if status != 204:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", double
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def set_gcs(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Point this process, and those that it starts, at the double."""
    for name, value in {"GOOGLE_BASE_URL": endpoint, "GOOGLE_BEARER_TOKEN": "double", "NO_PROXY": "*"}.items():
        patch.setenv(name, value)
