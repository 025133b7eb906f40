"""Servers of object stores for tests, each in this process and with a bucket of its own for each test."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

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


def make_bucket(endpoint: str) -> str:
    """Make a bucket of a new name, and return its URL."""
    import boto3

    name = f"test-{uuid.uuid4().hex}"
    client = boto3.client(
        "s3", endpoint_url=endpoint, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
    )
    client.create_bucket(Bucket=name)
    return f"s3://{name}"


@contextmanager
def moto_server() -> Iterator[str]:
    """Run moto's S3 in a thread of this process, and yield its endpoint."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()
