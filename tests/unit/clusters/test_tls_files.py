"""Files of certificates that are missing, cannot be read, or have no use."""

import pytest

import paceline as pl
from paceline.clusters.tls_files import check_tls_files


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (["tls_ca"], "tls_cert and tls_key without tls_ca: give tls_cert, tls_key, tls_ca together, or omit all three"),
        (["tls_cert", "tls_ca"], "tls_key without tls_cert and tls_ca: give"),
        (["tls_key"], "tls_cert and tls_ca without tls_key: give"),
    ],
)
def test_a_missing_option_for_certificates_is_named(tls, without, message):
    with pytest.raises(pl.UsageError, match=message):
        check_tls_files({name: path for name, path in tls.items() if name not in without}, encrypt=True)


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_ca"])
def test_a_file_of_certificates_that_cannot_be_read_is_named(tls, name, tmp_path):
    with pytest.raises(
        pl.UsageError, match=rf"{name}='/no/file' cannot be read \(No such file or directory\): give a PEM"
    ):
        check_tls_files({**tls, name: "/no/file"}, encrypt=True)
    with pytest.raises(pl.UsageError, match=rf"{name}=.* cannot be read \(Is a directory\)"):
        check_tls_files({**tls, name: tmp_path}, encrypt=True)


def test_certificates_need_encryption(tls):
    check_tls_files({}, encrypt=False)
    with pytest.raises(
        pl.UsageError, match="encrypt=False with tls_cert, tls_key, tls_ca, which need TLS: omit encrypt"
    ):
        check_tls_files(tls, encrypt=False)
