"""Processes that torchrun has started, and their files for TLS."""

import pytest

FOUR = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}


@pytest.fixture
def started(monkeypatch):
    """Let this process be a rank."""

    def start(**changes):
        for name in (
            *FOUR,
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "PACELINE_TOKEN",
            "PACELINE_SIDECAR",
            "TORCHELASTIC_RESTART_COUNT",
        ):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**FOUR, **changes}.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return start


@pytest.fixture
def tls(tmp_path):
    """Options with the files of an organisation's certificates."""
    options = {}
    for name in ("tls_cert", "tls_key", "tls_ca"):
        (tmp_path / f"{name}.pem").write_text(name)
        options[name] = str(tmp_path / f"{name}.pem")
    return options
