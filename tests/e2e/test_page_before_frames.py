"""The report where no frame has come yet: printed in time and in the shape of the screen, and with a cursor."""

import pytest

import paceline as pl
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


ONE_FRAME = """
const [frame, asked] = [window.requestAnimationFrame, []];
window.requestAnimationFrame = (callback) => asked.push(callback) > 1 ? 1 : frame(callback);
"""


def test_a_cursor_may_come_before_the_first_frame_of_a_chart(browser, tmp_path):
    train_run(tmp_path / "run", "k_sync(k=2)@50% >> asp", stop=pl.Stop(gradients=80))
    errors, page = [], browser.new_context().new_page()
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.add_init_script(ONE_FRAME)
    page.goto(write_report([tmp_path / "run"], tmp_path / "report.html").as_uri())
    page.wait_for_selector("html[data-shown]", state="attached")
    charts = page.locator("canvas[aria-roledescription=chart]")
    assert charts.count() > 5
    for at in range(charts.count()):
        charts.nth(at).focus()
        page.keyboard.press("ArrowRight")
        charts.nth(at).hover(force=True)
    page.context.close()
    assert errors == []
