"""The report on paper: drawn in time, and in the shape of the screen."""

import pytest

from chromium import NEEDS_CHROMIUM
from paceline.report.write import write_report
from written_runs import train_run

pytestmark = NEEDS_CHROMIUM


@pytest.mark.slow
def test_a_page_that_is_printed_as_soon_as_it_is_there_has_charts_of_the_same_shape(browser, tmp_path):
    train_run(tmp_path / "run")
    target = write_report([tmp_path / "run"], tmp_path / "report.html")
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.add_init_script("""document.addEventListener("DOMContentLoaded", () => {
        window.requestAnimationFrame = () => 0;
        window.dispatchEvent(new Event("beforeprint"));
    })""")
    page.goto(target.as_uri())
    assert (
        page.evaluate("""() => {
        const canvas = document.querySelector("#loss canvas");
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size;
    }""")
        > 5
    )
    page.emulate_media(media="print")
    page.set_viewport_size({"width": 640, "height": 900})
    shape = page.evaluate("""() => {
        const canvas = document.querySelector("#loss canvas"), box = canvas.getBoundingClientRect();
        return [canvas.width / canvas.height, box.width / box.height];
    }""")
    assert shape[1] == pytest.approx(shape[0], rel=0.02)
    page.context.close()
