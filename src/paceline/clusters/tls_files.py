"""Files of an organisation's certificates for TLS."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from paceline.errors import UsageError, describe_read_error

TLS_FILES = ("tls_cert", "tls_key", "tls_ca")


def check_tls_files(files: Mapping[str, str | Path], *, encrypt: bool) -> None:
    """Check that the files for TLS are given together and can be read.

    Args:
        files: files that were given, by their names in `TLS_FILES`.
        encrypt: whether connections use TLS.

    Raises:
        UsageError: some of the files are missing, cannot be read, or have no use.
    """
    missing = [name for name in TLS_FILES if name not in files]
    if files and missing:
        raise UsageError(
            f"{' and '.join(files)} without {' and '.join(missing)}: give {', '.join(TLS_FILES)} together, or omit all "
            "three to authenticate by the token"
        )
    if files and not encrypt:
        raise UsageError(f"encrypt=False with {', '.join(TLS_FILES)}, which need TLS: omit encrypt, or the three")
    for name, path in files.items():
        try:
            Path(path).read_bytes()
        except (OSError, ValueError) as error:  # ValueError: a path with a null byte
            reason = describe_read_error(error) if isinstance(error, OSError) else error
            raise UsageError(f"{name}={str(path)!r} cannot be read ({reason}): give a PEM file of this host") from None
