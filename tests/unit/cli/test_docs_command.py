import re
import sys
from pathlib import Path

import pytest

from paceline.cli import docs as module
from paceline.cli import main
from paths import ROOT


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """Pages of a clone: one page in plain Sphinx."""
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "conf.py").write_text("html_theme = 'basic'\n")
    (folder / "index.rst").write_text("Title\n=====\n\nText.\n")
    monkeypatch.setattr(module, "CLONE", folder)
    return folder


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["paceline", "docs", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code


@pytest.mark.slow
@pytest.mark.processes
def test_the_pages_are_built_and_opened_or_only_named(pages, tmp_path, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(module.webbrowser, "open", lambda place: opened.append(place) or True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert not call(monkeypatch)
    (place,) = capsys.readouterr().out.splitlines()
    assert re.search(r"/cache/paceline/docs-[^/]+/html/index.html$", place)
    assert "Text." in Path(place).read_text()
    assert opened == [f"file://{place}"]
    assert not call(monkeypatch, "--no-open", "--out", tmp_path / "site")
    assert capsys.readouterr().out == f"{tmp_path}/site/html/index.html\n"
    assert len(opened) == 1


@pytest.mark.slow
def test_the_pages_of_a_wheel_are_built_from_a_copy(pages, tmp_path, monkeypatch, capsys):
    wheel = tmp_path / "installed" / "docs"
    wheel.parent.mkdir()
    pages.rename(wheel)
    monkeypatch.setattr(module, "WHEEL", wheel)
    assert not call(monkeypatch, "--no-open", "--out", tmp_path / "site")
    assert "Text." in Path(capsys.readouterr().out.strip()).read_text()
    assert (tmp_path / "site/pages/docs/index.rst").exists()


def test_without_a_browser_the_place_is_named(pages, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module.webbrowser, "open", lambda place: False)
    monkeypatch.setattr(module, "build", lambda pages, folder: tmp_path / "index.html")
    assert not call(monkeypatch)
    assert "open the file above" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.processes
def test_missing_pages_and_packages_and_a_failed_build_are_one_line(pages, tmp_path, monkeypatch, capsys):
    (pages / "conf.py").write_text("raise RuntimeError('broken')\n")
    assert call(monkeypatch, "--no-open", "--out", tmp_path / "site") == 1
    assert "paceline: the documentation was not built: " in capsys.readouterr().err
    monkeypatch.setattr(module, "NEEDED", ("sphinx", "no_such_package"))
    assert call(monkeypatch) == 2
    assert "needs no_such_package; run: pip install 'paceline[docs]'" in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr(module, "CLONE", tmp_path)
    assert call(monkeypatch) == 2
    assert "this installation has no documentation" in capsys.readouterr().err


def test_the_pages_of_this_repository_are_found():
    assert module.sources() == ROOT / "docs"
