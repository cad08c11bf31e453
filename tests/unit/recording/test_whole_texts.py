"""Files with the whole texts of errors: few, printable, and named where the text is shortened."""

import pytest

from paceline.core.bounds import LONGEST_TEXT
from paceline.recording.whole_texts import MOST_FILES, WholeTexts

LONG = "a\x1b[2J\n" + "ü" * 100_000


def test_a_long_text_names_the_file_that_has_all_of_it(tmp_path):
    shown = WholeTexts(tmp_path).shortened(LONG, "worker-3")
    path = tmp_path / "errors" / "worker-3-1.txt"
    assert len(shown) == LONGEST_TEXT
    assert shown.startswith("a\\x1b[2J\nüüü")
    assert shown.endswith(f"üüü... (the whole text is in {path})")
    assert path.read_text(encoding="utf-8") == "a\\x1b[2J\n" + "ü" * 100_000


def test_a_short_text_and_a_run_without_a_folder_have_no_file(tmp_path):
    assert WholeTexts(tmp_path).shortened("a\x1b", "worker-3") == "a\\x1b"
    for folder in (None, tmp_path / "none"):
        assert WholeTexts(folder).shortened(LONG, "worker-3").endswith("üüü...")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("again", [False, True], ids=["one process", "resumed"])
def test_a_run_has_a_bounded_number_of_files(again, tmp_path):
    texts = WholeTexts(tmp_path)
    for number in range(MOST_FILES + 2):
        shown = (WholeTexts(tmp_path) if again else texts).shortened(LONG, f"worker-{number % 2}")
    assert shown.endswith(f"... ({tmp_path / 'errors'} has {MOST_FILES} whole texts already)")
    assert len(list((tmp_path / "errors").iterdir())) == MOST_FILES


def test_a_text_that_cannot_be_written_is_shortened_with_the_reason(tmp_path):
    (tmp_path / "errors").write_text("")
    assert WholeTexts(tmp_path).shortened(LONG, "a").endswith("... (the whole text cannot be written: File exists)")


def test_no_link_is_followed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run" / "errors").symlink_to(tmp_path / "elsewhere")
    assert "the whole text cannot be written: it is a symbolic link" in WholeTexts(tmp_path / "run").shortened(
        LONG, "a"
    )
    assert list((tmp_path / "elsewhere").iterdir()) == []
