"""The page in a real browser: what it asks for, what it draws, how it answers pointer and keys."""

import re
import struct
import zlib

import pytest

import paceline as pl
from chromium import NEEDS_CHROMIUM
from paceline.core.records import DecisionMade, UpdateMade
from paceline.recording.run_folder import EVENTS
from paceline.report.write import write_report
from selections import parametrize_few
from written_runs import begun, ended, train_run, two_updates, update, write_run

HOSTILE = f"</script><script>window.broken = true</script>{'long' * 80}"

TOUCH_EVERYTHING = """async () => {
    const drawn = () => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
    for (const canvas of document.querySelectorAll("canvas")) {
        canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: 300, clientY: 300, bubbles: true }));
        await drawn();
        for (const key of ["ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp", "End", "+", "-"]) {
            canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
        }
        await drawn();
    }
}"""

pytestmark = NEEDS_CHROMIUM


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two seeds of one protocol and one of another, which switches."""
    folder = tmp_path_factory.mktemp("report")
    for seed in (0, 1):
        train_run(folder / f"bsp-{seed}", "bsp", seed)
    train_run(folder / "switch", "k_sync(k=2)@50% >> asp", stop=pl.Stop(gradients=80))
    return folder


VIEWPORT = {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def usual_page(browser):
    """A page without options: it loads one report after the other, which is faster than a new page for each."""
    return browser.new_context(viewport=VIEWPORT).new_page()


@pytest.fixture
def open_page(browser, usual_page):
    """Function that opens a report; at the end it must have caused no error and no request but its own."""
    troubles, requests, pages = [], [], []

    def on_console(message):
        if message.type == "error":
            troubles.append(message.text)

    listeners = {
        "console": on_console,
        "pageerror": lambda error: troubles.append(str(error)),
        "request": lambda request: requests.append(request.url),
    }

    def opened(runs, out, **options):
        target = write_report(runs, out / "report.html")
        page = browser.new_context(**{"viewport": VIEWPORT, **options}).new_page() if options else usual_page
        pages.append(page)
        page.mouse.move(0, 0)
        for event, listener in listeners.items():
            page.on(event, listener)
        page.goto(target.as_uri())
        page.wait_for_selector("html[data-shown]", state="attached")
        return page

    yield opened
    for page in pages:
        if page is not usual_page:
            page.context.close()
            continue
        for event, listener in listeners.items():
            page.remove_listener(event, listener)
    assert troubles == []
    assert len(requests) == len(pages), requests
    assert all(url.startswith("file://") for url in requests)


def picture(page, chart):
    """Return what a chart has drawn, after it has drawn again if it is going to."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    return page.evaluate(f"document.querySelector('#{chart} canvas').toDataURL()")


def tip(page, chart):
    found = page.locator(f"#{chart} .tip")
    return found.inner_text() if found.is_visible() else ""


def said(page):
    return page.locator("#said").inner_text()


def shades(png):
    """Return how many different bytes a picture's pixels have."""
    chunks, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            chunks += png[at + 8 : at + 8 + length]
        at += 12 + length
    return len(set(zlib.decompress(chunks)))


def colours(page, chart):
    """Return how many different pixels the one canvas of a chart has."""
    return page.evaluate(f"""() => {{
        const canvas = document.querySelector("#{chart} canvas");
        const {{ data }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return new Set(new Uint32Array(data.buffer)).size;
    }}""")


def test_the_page_is_drawn(open_page, folder, tmp_path):
    page = open_page([folder], tmp_path)
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert shades((tmp_path / "page.png").read_bytes()) > 100
    charts = ["loss", "accuracy", "k", "timeline", "round-trips", "heat", "staleness"]
    assert all(page.locator(f"#{chart} canvas").is_visible() for chart in charts)
    assert all(colours(page, chart) > 10 for chart in charts)


@pytest.mark.slow
def test_the_axis_can_be_switched(open_page, folder, tmp_path):
    page = open_page([folder], tmp_path)
    pictures = [picture(page, "loss")]
    for axis in ("updates", "workload"):
        page.get_by_label(axis, exact=True).check()
        pictures.append(picture(page, "loss"))
    page.get_by_label("logarithmic loss").check()
    pictures.append(picture(page, "loss"))
    assert len(set(pictures)) == 4


def test_pointing_at_the_quorum_tells_k_and_why(open_page, folder, tmp_path):
    page = open_page([folder / "switch"], tmp_path)
    page.locator("#k canvas").hover(position={"x": 90, "y": 60})
    shown = tip(page, "k")
    assert "k = 2, quorum of 2 reached" in shown
    assert "in force: k_sync(k=2): the run begins" in shown
    page.locator("#k canvas").hover(position={"x": 1150, "y": 60})
    shown = tip(page, "k")
    assert "k = 1" in shown
    assert "in force: asp: 40 gradients reached" in shown


def test_each_update_tells_its_own_k_on_every_axis(open_page, tmp_path):
    reasons = ["quorum of 4 reached: the first", "quorum of 1 reached: second", "quorum of 3 reached: the third"]
    ks, times, workloads = [4, 1, 3], [1.0, 7.0, 8.0], [4, 5, 8]
    records = [begun()]
    for number in range(3):
        records.append(
            DecisionMade(now_s=times[number], kind="quorum", reason=f"k={ks[number]}: chosen {number}", k=ks[number])
        )
        records.append(
            update(number + 1, times[number], ks[number], workload=workloads[number], reason=reasons[number])
        )
    write_run(tmp_path / "run", [*records, ended(8.0, 16.0)])
    page = open_page([tmp_path / "run"], tmp_path)
    canvas = page.locator("#k canvas")
    for axis in ("time", "updates", "workload"):
        page.get_by_label(axis, exact=True).check()
        canvas.focus()
        seen = []
        for _ in range(3):
            page.keyboard.press("ArrowRight")
            seen.append(tip(page, "k"))
        canvas.blur()
        for number, shown in enumerate(seen):
            assert f"update {number + 1}: k = {ks[number]}, {reasons[number]}" in shown, axis
            assert f"decided: k={ks[number]}: chosen {number}" in shown


def test_arrow_keys_move_the_cursor_and_say_where_it_is(open_page, folder, tmp_path):
    page = open_page([folder], tmp_path)
    page.locator("#loss canvas").focus()
    page.keyboard.press("ArrowRight")
    first = said(page)
    page.keyboard.press("Shift+ArrowRight")
    assert "bsp: " in said(page)
    assert said(page) != first


@pytest.mark.slow
def test_a_band_tells_its_smallest_and_largest_value(open_page, folder, tmp_path):
    page = open_page([folder / "bsp-0", folder / "bsp-1"], tmp_path)
    page.locator("#loss canvas").hover(position={"x": 700, "y": 60})
    head, value = tip(page, "loss").split("\n")
    mean, low, _, high = value.removeprefix("bsp: ").replace("(", "").replace(")", "").split()
    assert float(low) <= float(mean) <= float(high)
    assert head.startswith("at ")


def test_the_timeline_zooms_and_pans_and_comes_back(open_page, folder, tmp_path):
    page = open_page([folder / "switch"], tmp_path)
    canvas, view = page.locator("#timeline canvas"), page.locator("#view")
    drawn = picture(page, "timeline")  # which waits until the chart has been drawn, and the view named
    whole = view.inner_text()
    views = [whole]

    def changed():
        assert picture(page, "timeline") != drawn
        views.append(view.inner_text())
        assert views[-1] not in views[:-1]

    page.get_by_label("zoom in").click()
    changed()
    canvas.focus()
    page.keyboard.press("+")
    changed()
    page.keyboard.press("Shift+ArrowRight")
    changed()
    canvas.hover(position={"x": 600, "y": 60})
    page.mouse.wheel(0, -100)
    changed()
    page.mouse.down()
    page.mouse.move(500, 400)
    page.mouse.up()
    changed()
    page.keyboard.press("Home")
    page.mouse.move(0, 0)
    picture(page, "timeline")
    assert view.inner_text() == whole


@pytest.mark.slow
def test_the_wheel_scrolls_the_page_while_the_timeline_is_not_in_use(open_page, folder, tmp_path):
    page = open_page([folder / "switch"], tmp_path)
    page.locator("#timeline canvas").hover(position={"x": 600, "y": 60})
    whole = page.locator("#view").inner_text()
    page.mouse.wheel(0, -100)
    picture(page, "timeline")
    assert page.locator("#view").inner_text() == whole


def test_the_timeline_tells_of_each_piece_of_work(open_page, tmp_path):
    write_run(tmp_path / "run", two_updates())
    page = open_page([tmp_path / "run"], tmp_path)
    canvas = page.locator("#timeline canvas")
    box = canvas.bounding_box()
    area = {"left": 58, "width": box["width"] - 58 - 14}

    def at(seconds, worker):
        canvas.hover(position={"x": area["left"] + area["width"] * seconds / 4, "y": 12 + 30 * worker + 15})
        return tip(page, "timeline")

    assert "worker 0, draw 1: used" in at(0.5, 0)
    assert "1 s, from 0 to 1 s" in at(0.5, 0)
    assert "worker 0: idle" in at(1.5, 0)
    assert "worker 1, draw 1: used" in at(1.5, 1)
    assert "version 0, staleness 0" in at(1.5, 1)
    assert "worker 1, draw 2: used" in at(2.5, 1)


def test_arrow_keys_walk_from_work_to_work(open_page, tmp_path):
    write_run(tmp_path / "run", two_updates())
    page = open_page([tmp_path / "run"], tmp_path)
    page.locator("#timeline canvas").focus()
    walked = []
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
        walked.append(said(page).partition(":")[0])
    assert walked == ["worker 0, draw 1", "worker 0, draw 2", "worker 1, draw 2", "worker 1, draw 1"]


@pytest.mark.slow
def test_another_run_can_be_chosen(open_page, folder, tmp_path):
    page = open_page([folder], tmp_path)
    before = picture(page, "timeline"), picture(page, "staleness")
    page.locator("#run").select_option(index=2)
    page.wait_for_selector("html[data-shown='2']", state="attached")
    assert picture(page, "timeline") != before[0]
    assert picture(page, "staleness") != before[1]


@pytest.mark.slow
def test_dark_and_light_follow_the_system_and_the_button(open_page, folder, tmp_path):
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = open_page([folder / "switch"], tmp_path, color_scheme="dark")
    light = open_page([folder / "switch"], tmp_path, color_scheme="light")
    dark_paper, light_paper = dark.evaluate(paper), light.evaluate(paper)
    assert dark_paper != light_paper
    for chart in ("loss", "timeline", "heat", "staleness"):
        assert picture(dark, chart) != picture(light, chart)
    for page, other in ((dark, light_paper), (light, dark_paper)):
        own = page.evaluate(paper)
        page.get_by_role("button", name="Dark/light").click()
        assert page.evaluate(paper) == other
        page.get_by_role("button", name="Dark/light").click()
        assert page.evaluate(paper) == own


@pytest.mark.parametrize("width", [400, pytest.param(1280, marks=pytest.mark.slow)])
def test_nothing_sticks_out_of_the_page(open_page, folder, tmp_path, width):
    page = open_page([folder], tmp_path, viewport={"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_everything_can_be_reached_with_the_tab_key_and_has_a_name(open_page, folder, tmp_path):
    page = open_page([folder], tmp_path)
    reached = set()
    for _ in range(24):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.parentElement.id + '|' + document.activeElement.id"))
    for chart in ("loss", "accuracy", "k", "timeline", "round-trips", "heat", "staleness"):
        assert f"{chart}|" in reached
        assert page.locator(f"#{chart} canvas").get_attribute("aria-label")
    assert any(name.endswith("|run") for name in reached)
    assert any(name.endswith("|theme") for name in reached)


@pytest.mark.slow
@parametrize_few(
    ("records", "settings"),
    [
        (two_updates(reason=HOSTILE), {"job": HOSTILE, "protocol": HOSTILE}),
        ([begun()], {}),
        (two_updates(loss=float("nan")), {}),
        pytest.param(two_updates()[:-1], {}, marks=pytest.mark.slow),
        pytest.param(two_updates(loss=float("inf")), {}, marks=pytest.mark.slow),
        pytest.param(two_updates(loss=-1.0, compute_s=float("nan")), {}, marks=pytest.mark.slow),
    ],
    ids=["hostile names", "no update", "nan losses", "still going", "infinite losses", "negative losses"],
    keep=1,
)
def test_odd_runs_are_shown_without_any_error(open_page, tmp_path, records, settings):
    write_run(tmp_path / "run", records, **settings)
    page = open_page([tmp_path / "run"], tmp_path)
    has_updates = any(isinstance(record, UpdateMade) for record in records)
    assert page.locator("#progress").is_visible() == page.locator("#one").is_visible() == has_updates
    if has_updates:
        page.get_by_label("logarithmic loss").check()
        page.get_by_label("workload", exact=True).check()
    page.evaluate(TOUCH_EVERYTHING)
    assert not page.evaluate("window.broken")
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280


def rows_of_ink(page, chart):
    """Return the first and the last row of a chart that its line is drawn in, as shares of the height."""
    return page.evaluate(f"""() => {{
        const canvas = document.querySelector("#{chart} canvas");
        const {{ data, width, height }} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const rows = [];
        for (let y = 0; y < height; y += 1) for (let x = 0; x < width; x += 1) {{
            const [red, green, blue] = data.subarray(4 * (y * width + x), 4 * (y * width + x) + 3);
            if (blue > 140 && red < 80 && green > 60) rows.push(y / height);
        }}
        return [Math.min(...rows), Math.max(...rows)];
    }}""")


@pytest.mark.slow
def test_the_axis_of_the_loss_fits_the_data(open_page, folder, tmp_path):
    page = open_page([folder / "bsp-0"], tmp_path)
    picture(page, "loss")
    top, bottom = rows_of_ink(page, "loss")
    assert top < 0.15
    assert bottom > 0.65


@pytest.mark.slow
def test_a_worker_without_any_finished_work_has_a_row_of_round_trips(open_page, tmp_path):
    slow = pl.Cluster(3, pl.timing.ShiftedExponential(shift_s=0.9, mean_s=0.1), speed=[1.0, 1.0, 0.25])
    train_run(tmp_path / "run", "k_sync(k=2)", cluster=slow, updates=20)
    page = open_page([tmp_path / "run"], tmp_path)
    chart = page.locator("#round-trips canvas")
    chart.focus()
    for _ in range(3):
        page.keyboard.press("ArrowDown")
    assert "worker 2: median at least 1." in said(page)
    assert "no task finished" in said(page)


@pytest.mark.slow
def test_a_run_that_diverges_does_not_flatten_the_others(open_page, folder, tmp_path):
    log = train_run(tmp_path / "pull", "pull(k=2)", updates=5).path / EVENTS
    log.write_text(re.sub(r'"loss":([\d.]+)', r'"loss":\1e6', log.read_text()))
    page = open_page([folder / "bsp-0", tmp_path / "pull"], tmp_path)
    picture(page, "loss")
    top, bottom = rows_of_ink(page, "loss")
    assert top < 0.2
    assert bottom > 0.6
