"""Where the credentials of object stores come from, and that no secret is printed, logged or kept in an error."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
import traceback
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from reshard_ckpt.errors import StorageError
from reshard_ckpt.storage import open_storage
from reshard_ckpt.storage.object_client import _OF_OBSTORE, _credentials, client_of
from tests.storage.contract import put

SECRET = "SeCrEtSeCrEtSeCrEt"
CLOSED = "http://127.0.0.1:9"  # the port of "discard", where nobody listens
SECRETS = {
    "s3": {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": SECRET, "AWS_ENDPOINT_URL": CLOSED},
    "gs": {"GOOGLE_BEARER_TOKEN": SECRET, "GOOGLE_BASE_URL": CLOSED},
    "az": {
        "AZURE_STORAGE_ACCOUNT_NAME": "account",
        "AZURE_STORAGE_SAS_TOKEN": f"sv=2024-01-01&sp=rw&sig={SECRET}",
        "AZURE_STORAGE_ENDPOINT": CLOSED,
    },
}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take away the credentials of other tests, and the clients made with them."""
    for name in {name for names in _OF_OBSTORE.values() for name in names}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    client_of.cache_clear()


@pytest.mark.parametrize("scheme", SECRETS)
def test_no_secret_is_shown(scheme: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, value in SECRETS[scheme].items():
        monkeypatch.setenv(name, value)
    caplog.set_level(logging.DEBUG)
    with open_storage(f"{scheme}://a-bucket/run", timeout_s=0.1) as storage:
        shown = [repr(storage), repr(vars(storage)), repr(storage.create("f"))]
        for call in (lambda: put(storage, "f"), lambda: storage.read("f", 9), storage.list, lambda: storage.delete(["f"])):
            with pytest.raises(StorageError, match="cannot") as caught:
                call()
            shown += [
                *traceback.TracebackException.from_exception(caught.value, capture_locals=True).format(),
                repr(caught.value),
            ]
    assert len(shown) > 10
    assert not [line for line in [*shown, caplog.text] if SECRET in line]
    client_of.cache_clear()


def test_boto3_finds_the_credentials_that_obstore_does_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "credentials").write_text(f"[default]\naws_access_key_id = from-file\naws_secret_access_key = {SECRET}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    found = _credentials("s3")
    assert found()["access_key_id"] == "from-file"
    assert SECRET not in repr(found)


def test_credentials_that_expire_are_renewed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process of the user's prints credentials that are about to expire: each question starts it again."""
    until = (datetime.now(timezone.utc) + timedelta(seconds=30)).isoformat()
    made = {"Version": 1, "AccessKeyId": "AT", "SecretAccessKey": SECRET, "SessionToken": SECRET, "Expiration": until}
    program = (
        "import pathlib\n"
        f"times = pathlib.Path({str(tmp_path / 'times')!r})\n"
        "number = len(times.read_text()) if times.exists() else 0\n"
        "times.write_text('x' * (number + 1))\n"
        f"print({json.dumps(made)!r}.replace('AT', f'key-{{number}}', 1))\n"
    )
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {tmp_path / 'program.py'}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    provider = _credentials("s3")
    first, second = provider(), provider()
    assert first["access_key_id"] != second["access_key_id"]
    left = second["expires_at"] - datetime.now(timezone.utc)
    assert left < timedelta(minutes=10)  # boto3 returns no credentials that end sooner


class _Tokens(BaseHTTPRequestHandler):
    """A machine's own service for tokens: Google's metadata server, and the endpoint of an identity of Azure."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        token = {"access_token": f"{SECRET}-{len(self.server.asked)}", "token_type": "Bearer"}  # type: ignore[attr-defined]
        if path == "/azure" and self.headers["X-IDENTITY-HEADER"] == "proof":
            answer: Any = {**token, "expires_on": str(int(time.time()) + 3600), "resource": "https://storage.azure.com"}
        elif path.endswith("/token"):
            answer = {**token, "expires_in": 3600}
        elif path.endswith("/service-accounts/default/"):
            answer = {"email": "job@project", "scopes": [], "aliases": ["default"]}
        else:
            answer = "project"
        if "access_token" in answer:
            self.server.asked.append(path)  # type: ignore[attr-defined]
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Metadata-Flavor", "Google")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.mark.parametrize(("scheme", "library"), [("gs", "google.auth.transport.requests"), ("az", "azure.identity")])
def test_the_libraries_of_google_and_azure_ask_the_machine_for_a_token(
    scheme: str, library: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip(library, reason="make test-stores installs it")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Tokens) as server:
        server.asked = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        for name, value in {
            "GCE_METADATA_HOST": host, "GCE_METADATA_IP": host, "CLOUDSDK_CONFIG": str(tmp_path),
            "IDENTITY_ENDPOINT": f"http://{host}/azure", "IDENTITY_HEADER": "proof", "AZURE_CONFIG_DIR": str(tmp_path),
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        provider = _credentials(scheme)
        assert provider is not None
        found = provider()
        server.shutdown()
    assert found["token"] == f"{SECRET}-0"
    assert timedelta(minutes=50) < found["expires_at"] - datetime.now(timezone.utc) <= timedelta(hours=1)
    assert server.asked  # type: ignore[attr-defined]
    assert SECRET not in repr(provider)
