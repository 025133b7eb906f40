"""Clients of object stores: obstore's client of a bucket, its credentials, and the named errors of its failures.

`obstore <https://developmentseed.org/obstore/>`_ is imported at the first use of an ``s3://``, ``gs://`` or ``az://`` path. It
retries a request that failed with backoff and jitter, until the caller's `timeout_s` has passed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any

from ..errors import StorageError, UsageError
from .protocol import missing

_MAX_RETRIES = 1_000_000
"""The most retries of a request: so many that only time ends them. obstore's default of ten is over after three seconds of a
store that answers "slow down"."""

_BACKOFF = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=10), "base": 2}
_REQUEST_S = 120.0
"""Seconds after which one request is given up, and sent again."""

_made_before_fork = False
_has_clients = False


def _after_fork() -> None:
    global _made_before_fork
    _made_before_fork = _has_clients


os.register_at_fork(after_in_child=_after_fork)


def obstore() -> Any:
    """Import obstore, and return the module.

    Raise `UsageError` if it is not installed, and `StorageError` if this process was forked from one that used obstore, whose
    threads do not run here: a request would hang.
    """
    if _made_before_fork:
        raise StorageError(
            "this process was forked after its parent had used an object store, and the store's threads do not run in the child: "
            "start it by spawn (multiprocessing.get_context('spawn')), or use the path first in the child"
        )
    try:
        import obstore
    except ImportError:
        raise UsageError("paths s3://, gs:// and az:// need obstore: pip install 'reshard-ckpt[cloud]'") from None
    return obstore


_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""For each scheme, the environment variables with the address of another server than the provider's own."""


@lru_cache(64)
def client_of(scheme: str, bucket: str, timeout_s: float) -> Any:
    """Return obstore's client of a bucket. It is cached, because it holds open connections."""
    global _has_clients
    obstore()
    from obstore.store import from_url

    options: dict[str, Any] = {
        "client_options": {"timeout": timedelta(seconds=_REQUEST_S)},
        "retry_config": {"max_retries": _MAX_RETRIES, "retry_timeout": timedelta(seconds=timeout_s), "backoff": _BACKOFF},
    }
    endpoint = next((os.environ[name] for name in _ENDPOINTS[scheme] if os.environ.get(name)), None)
    if endpoint:
        options["base_url" if scheme == "gs" else "endpoint"] = endpoint
        options["client_options"]["allow_http"] = endpoint.startswith("http://")
    if scheme == "az" and "AZURE_STORAGE_ACCOUNT_NAME" in os.environ:
        # obstore finds it there too, but the `repr` of its client, as in a traceback with locals, panics without this.
        options["account_name"] = os.environ["AZURE_STORAGE_ACCOUNT_NAME"]
    provider = _credentials(scheme)
    if provider is not None:
        options["credential_provider"] = provider
    with explained("open", f"{scheme}://{bucket}"):
        client = from_url(f"{scheme}://{bucket}", **options)
    _has_clients = True
    return client


_OF_OBSTORE = {
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
           "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY",
           "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BEARER_TOKEN", "GOOGLE_SKIP_SIGNATURE"),
    "az": ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_SAS_KEY",
           "AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_TOKEN", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_STORAGE_USE_EMULATOR",
           "AZURE_SKIP_SIGNATURE", "AZURE_STORAGE_SKIP_SIGNATURE"),
}  # fmt: skip
"""For each scheme, the environment variables by which obstore finds credentials. If any is set, the provider's library, such as
boto3, is not asked for credentials."""


_ASK_AGAIN = timedelta(minutes=5)
"""The time for which obstore uses credentials of boto3 before it asks again. They last for at least ten minutes more, and obstore
does not see when they end."""


def _credentials(scheme: str) -> Any:
    """Return a function for obstore that asks the provider's own library (such as boto3) for credentials, if it is installed.

    The library reads files, signs on, and renews credentials. Return None if the environment has credentials for obstore, or if
    the library finds none or is not installed: then obstore asks the machine that it runs on.
    """
    if any(name in os.environ for name in _OF_OBSTORE[scheme]):
        return None
    with suppress(ImportError):
        if scheme == "s3":
            import boto3
            from obstore.auth.boto3 import Boto3CredentialProvider

            session = boto3.Session()
            return Boto3CredentialProvider(session, ttl=_ASK_AGAIN) if session.get_credentials() is not None else None
        with suppress(Exception):  # the chain found nothing, and each library says so by an error of its own
            if scheme == "gs":
                from obstore.auth.google import GoogleCredentialProvider

                return GoogleCredentialProvider()
            from obstore.auth.azure import AzureCredentialProvider

            return AzureCredentialProvider()
    return None


@contextmanager
def explained(what: str, where: str) -> Iterator[None]:
    """Turn obstore's errors in the ``with`` block into a `StorageError` with the operation and the place.

    The message has no query of a URL, which may hold a signature. The first error is not chained, because it has the query.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, FileNotFoundError) and not re.search("NoSuchBucket|NoSuchUpload", str(error)):
            raise missing(where) from None
        if type(error).__module__.partition(".")[0] != "obstore" and not isinstance(error, OSError | ValueError):
            raise
        raise StorageError(f"{where}: cannot {what}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    """Return one line with the cause of obstore's error, and advice on what to check."""
    text = re.sub(r"\?[^\s'\"<>)]*", "?…", str(error))
    status = re.search(r"status code: (\d{3} [A-Za-z ]+)", text)
    code = re.search(r"<Code>(\w+)</Code>", text)
    kind = type(error).__name__
    if kind in ("PermissionDeniedError", "UnauthenticatedError") or (status and status[1][:3] in ("401", "403")):
        advice = "; check the credentials and their rights (docs/object-stores.md)"
    elif code and code[1] == "NoSuchBucket":
        advice = "; make the bucket first, or check its name"
    else:
        advice = "; look at the store and the network, then try again"
    short = " ".join(part[1] for part in (status, code) if part) or " ".join(text.split("Debug source")[0].split())[:300]
    return f"{short}{advice}"


def is_generic(error: Exception) -> bool:
    """Whether obstore knows no cause of a failed request: it, or its answer, may have been lost on the way."""
    return type(error).__name__ == "GenericError"


def is_refusal(error: Exception) -> bool:
    """Whether a conditional PUT failed because its condition did not hold."""
    return type(error).__name__ in ("AlreadyExistsError", "PreconditionError") or isinstance(error, FileNotFoundError)
