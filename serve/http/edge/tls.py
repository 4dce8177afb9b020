"""HTTPS: the server's certificate, and optionally clients' certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

from serve.errors import ConfigError
from serve.http.edge.settings import HttpSettings


def tls_context(settings: HttpSettings) -> ssl.SSLContext | None:
    """Returns a context for TLS 1.2 or newer, or None without a certificate. Raises ConfigError,
    which names the file."""
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigError("tls_cert and tls_key are needed together; one of them is missing")
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        raise ConfigError("tls_client_ca needs tls_cert and tls_key")
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    for name in ("tls_cert", "tls_key", "tls_client_ca"):
        path = getattr(settings, name)
        if path is not None and not Path(path).is_file():
            raise ConfigError(f"{name} {path} is not a file")
    try:
        # without a password, OpenSSL asks the terminal for one
        context.load_cert_chain(settings.tls_cert, settings.tls_key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as exc:
        cause = getattr(exc, "reason", None) or exc
        raise ConfigError(
            f"tls_cert {settings.tls_cert} and tls_key {settings.tls_key} cannot be used: {cause}"
        ) from None
    if settings.tls_client_ca is not None:
        try:
            context.load_verify_locations(settings.tls_client_ca)
        except (ssl.SSLError, OSError) as exc:
            raise ConfigError(
                f"tls_client_ca {settings.tls_client_ca} has no certificate: {exc}"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted")
