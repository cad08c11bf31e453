"""What the check of a page finds: numbers without a source, and results that the page does not have."""

import pytest

from page_numbers import at_most, check_page, span

PAGE = """# Reproduction of ResNet-20

**Set-up.** 8 workers and `k_sync(k=4)`, as in Fig. 3 and 4.

| what | paper | measured |
| --- | --- | --- |
| loss | 7.5 | 0.25 (0.2 to
0.3) |

```
python -m papers.run --seeds 5
```

It takes 12
seconds of [two hours](https://example.org/3).
"""


def checked(tmp_path, computed, given, page=PAGE):
    path = tmp_path / "README.md"
    path.write_text(page.replace("to\n0.3", "to 0.3"))
    check_page(path, computed, given)


def test_settings_code_and_numbers_of_others_are_no_results(tmp_path):
    checked(tmp_path, ["| 0.25 (0.2 to 0.3) |", "takes 12 seconds"], ["8 workers"])
    checked(tmp_path, ["0.25 (0.2 to 0.3)", "12 sec"], ["**Set-up.**..."])


@pytest.mark.parametrize("computed", [["0.25 (0.2 to 0.3)"], ["0.25 (0.2 to", "takes 12 seconds"]])
def test_a_number_without_a_source_is_found(tmp_path, computed):
    with pytest.raises(AssertionError, match="neither computed nor given"):
        checked(tmp_path, computed, ["8 workers"])


@pytest.mark.parametrize(("computed", "given"), [(["takes 13 seconds"], ["8 workers"]), ([], ["9 workers"])])
def test_a_result_or_setting_that_the_page_does_not_have_is_found(tmp_path, computed, given):
    with pytest.raises(AssertionError, match="does not have"):
        checked(tmp_path, computed, given)


def test_computed_texts_may_overlap(tmp_path):
    checked(tmp_path, ["| 0.25 (0.2", "(0.2 to 0.3) |", "takes 12 seconds"], ["8 workers"])


def test_bounds_are_rounded_up_and_equal_ends_are_one_number():
    assert (at_most(0.02041, 3), at_most(0.3, 1)) == ("0.021", "0.3")
    assert (span([0.702, 0.698], 2), span([1.0, 2.5], 1)) == ("0.70", "1.0 to 2.5")
