"""An HTTP proxy before a store, which loses answers, cuts bodies and refuses requests as a test asks."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

Fault = Callable[[str, str], str]
"""Maps the method and the path of a request to its fate: ``""``: passed on; ``"drop"``: done by the store, never answered;
``"lose"``: not done, never answered; ``"500"``: done, answered by 500; ``"503"``: not done; ``"cut"``: half of the answer's body.
It is called once the whole request has arrived, and may wait: the request is then held back."""

QUIET_S = 0.1
"""Seconds without a new request after which a round of requests is complete,"""

IDLE_CPU_S = 0.01
"""and the seconds of processor time at most that this process uses meanwhile. At their end no thread may be ready to run."""

MAX_CONNECTIONS = 512
"""Each has a thread. A client that piles up connections under load is refused more, so that it cannot fill the machine."""

_HOP = ("connection", "transfer-encoding", "keep-alive", "content-length")


def _others_run() -> bool:
    """Tell whether another thread of this process runs, or would run if the machine were not busy."""
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            if (
                int(thread.name) != threading.get_native_id()
                and (thread / "stat").read_text().rpartition(")")[2].split()[0] == "R"
            ):
                return True
    return False


class FaultProxy:
    """A running proxy: `endpoint`, the `fault` that decides, and the requests that it has `seen`."""

    def __init__(self, target: str, *, drops: str = "", bare: bool = False) -> None:
        self.fault: Fault = lambda method, path: ""
        self.seen: list[tuple[str, str]] = []
        self.delay_s = 0.0
        """Latency that each request gets."""
        self.rounds: list[list[str]] | None = None
        """If a test puts a list here: the requests, in rounds. A round is all requests that arrive before one of them is
        answered; it ends `QUIET_S` after the last one arrived. So there are at least as many rounds as the longest chain of
        requests has, each of which waits for the answer of the one before it, however slow the server and this machine are."""
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._connections = 0
        self._round = threading.Condition()
        self._arrived: list[str] = []
        self._being_served, self._quiet_since, self._quiet_cpu_s = 0, 0.0, 0.0
        place = urlsplit(target)
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 60  # of a connection that is idle: each has a thread
            disable_nagle_algorithm = True  # headers and body are two writes: the second would wait for the client's 40 ms

            def _serve(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(size)
                with proxy._lock:
                    proxy.seen.append((self.command, self.path))
                fate = proxy.fault(self.command, self.path)
                time.sleep(proxy.delay_s)
                if fate == "lose" or len(body) < size:  # shorter if its sender was killed
                    self.close_connection = True
                    return
                with proxy._in_a_round(f"{self.command} {self.path}"):
                    self._pass_on(fate, body)

            def _pass_on(self, fate: str, body: bytes) -> None:
                if fate == "503":
                    self._answer(503, "Slow Down", {}, b"<Error><Code>SlowDown</Code></Error>")
                    return
                headers = {name: value for name, value in self.headers.items() if name.lower() != drops.lower()}
                tag = self.headers.get("If-Match", "")
                if bare and tag.startswith('"'):
                    self._answer(412, "Precondition Failed", {}, b"<Error><Code>PreconditionFailed</Code></Error>")
                    return
                if bare and tag:
                    headers = {**{n: v for n, v in headers.items() if n.lower() != "if-match"}, "If-Match": f'"{tag}"'}
                # moto looks at a condition and then writes, without a lock: conditional writes reach it one at a time.
                with proxy._writing if any(name.lower().startswith("if-") for name in headers) else nullcontext():
                    upstream = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60)
                    upstream.request(self.command, self.path, body, headers)
                    answer = upstream.getresponse()
                    data = answer.read()
                    upstream.close()
                if fate == "drop":
                    self.close_connection = True
                elif fate == "500":
                    self._answer(500, "Internal Server Error", {}, b"<Error><Code>InternalError</Code></Error>")
                else:
                    found = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
                    size = int(answer.getheader("Content-Length") or 0) if self.command == "HEAD" else len(data)
                    self._answer(answer.status, answer.reason, found, data, size, cut=fate == "cut")

            def _answer(
                self,
                status: int,
                reason: str,
                headers: dict[str, str],
                data: bytes,
                size: int | None = None,
                *,
                cut: bool = False,
            ) -> None:
                self.send_response_only(status, reason)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data) if size is None else size))
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if cut else data)
                self.close_connection = self.close_connection or cut

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # with Python's 5, connections that come at once are dropped, and tried again much later

            def process_request(self, request: Any, client_address: Any) -> None:
                if proxy._connections >= MAX_CONNECTIONS:  # the client tries again
                    self.shutdown_request(request)
                    return
                with proxy._lock:
                    proxy._connections += 1
                super().process_request(request, client_address)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    with proxy._lock:
                        proxy._connections -= 1

            def handle_error(self, *_: Any) -> None:  # the client is gone
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def once(self, fate: str, method: str, part: str) -> None:
        """Meet the first request of a method whose path has a part with a fault."""
        left = [1]

        def fault(found: str, path: str) -> str:
            with self._lock:
                if left and found == method and part in path:
                    left.clear()
                    return fate
            return ""

        self.fault = fault

    @contextmanager
    def _in_a_round(self, request: str) -> Iterator[None]:
        """Hold a request until no other one arrives for a while, and then let all of them go on at once."""
        if self.rounds is None:
            yield
            return
        with self._round:
            mine = self._arrived
            mine.append(request)
            self._note_activity()
            decides = len(mine) == 1
            while self._arrived is mine:
                self._round.wait(QUIET_S if decides else None)
                if self._arrived is not mine or self._being_served or time.monotonic() - self._quiet_since < QUIET_S:
                    continue
                # This process works, or a thread of it waits for a processor: its next request may be under way.
                if time.process_time() - self._quiet_cpu_s > IDLE_CPU_S or _others_run():
                    self._note_activity()
                    continue
                self.rounds.append(mine)
                self._being_served, self._arrived = len(mine), []
                self._round.notify_all()
        try:
            yield
        finally:
            with self._round:
                self._being_served -= 1
                self._note_activity()

    def _note_activity(self) -> None:
        self._quiet_since, self._quiet_cpu_s = time.monotonic(), time.process_time()

    def settle(self) -> None:
        """Wait until all that was sent by processes which have ended is done; nothing else may be connected."""
        place = urlsplit(self.endpoint)
        with socket.create_connection((place.hostname, place.port)) as last:  # the server accepts in order
            last.sendall(b"quit\r\n\r\n")
            while last.recv(1 << 10):
                pass
        while self._connections:
            time.sleep(0.001)

    def forget(self) -> None:
        """Forget the requests so far."""
        with self._lock:
            self.seen.clear()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def fault_proxy(target: str, *, drops: str = "", bare: bool = False) -> Iterator[FaultProxy]:
    """Run a proxy before the server at `target`. It forgets the header `drops`; if `bare`, it refuses ETags in quotes."""
    proxy = FaultProxy(target, drops=drops, bare=bare)
    try:
        yield proxy
    finally:
        proxy.close()
