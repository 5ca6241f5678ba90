"""The page in a headless Chromium: a chat, the live state, the keyboard, light and dark."""

import importlib.util
import shutil
import time

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="chromium and chromedriver are not installed",
    ),
    pytest.mark.skipif(
        importlib.util.find_spec("selenium") is None, reason="selenium is not installed"
    ),
]
SECONDS = 30


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument("--window-size=1200,800")
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options, service)
    driver.set_page_load_timeout(SECONDS)
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, server):
    browser.get(server.url)
    wait(lambda: text(browser, "state") == "ready")
    wait(lambda: text(browser, "model"))
    yield browser
    # Nothing was refused by the page's own policy, and no script failed.
    severe = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert severe == []


def wait(condition):
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def text(browser, name):
    return browser.execute_script("return document.getElementById(arguments[0]).innerText", name)


def value_of(browser, row):
    return browser.execute_script(
        "for (const dt of document.querySelectorAll('dt'))"
        " if (dt.textContent === arguments[0]) return dt.nextSibling.textContent",
        row,
    )


def keys(browser, *sent):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*sent).perform()


def test_a_question_gets_an_answer_by_keyboard_alone(page, server):
    from selenium.webdriver.common.keys import Keys

    # The message has the focus; Enter sends it.
    keys(page, "Hello", Keys.ENTER)
    wait(lambda: value_of(page, "finish reason"))
    turns = page.find_elements("css selector", ".turn")
    assert [turn.get_attribute("class").split()[-1] for turn in turns] == ["user", "turn"]
    assert turns[0].text == "Hello"
    assert turns[1].text
    assert int(value_of(page, "output tokens")) > 0
    # Tab reaches every control, and what has the focus is to be seen.
    reached = set()
    for _ in range(30):
        keys(page, Keys.TAB)
        focused = page.switch_to.active_element
        if name := focused.get_attribute("id"):
            reached.add(name)
            assert focused.value_of_css_property("outline-style") != "none", name
    assert {"send", "clear", "name", "system", "temperature", "max_tokens", "key"} <= reached
    controls = page.find_elements("css selector", "button, input, select, textarea")
    assert all(page.execute_script("return arguments[0].accessibleName", c) != "" for c in controls)


def test_the_state_is_live(page, server):
    server.complete([5] * 100, max_tokens=2)
    wait(lambda: value_of(page, "running") == "0")
    wait(lambda: "cached" in text(page, "legend"))
    counts = {
        word: int(count)
        for word, count in (line.split() for line in text(page, "legend").splitlines())
    }
    assert sum(counts.values()) == 128
    assert counts["cached"] >= 6
    assert "128 KV blocks of 16 tokens" in text(page, "map-title")
    wait(lambda: value_of(page, "tokens per second") not in (None, "-", "0.0"))
    painted = page.execute_script(
        "const c = document.getElementById('map');"
        "const data = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "return new Set(new Uint32Array(data.buffer)).size"
    )
    assert painted >= 3


def test_light_and_dark(page):
    seen = {}
    for scheme in ("light", "dark"):
        page.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )
        seen[scheme] = [
            page.execute_script(
                "return getComputedStyle(document.body)[arguments[0]].match(/\\d+/g).map(Number)",
                name,
            )
            for name in ("backgroundColor", "color")
        ]
    for back, ink in seen.values():
        assert contrast(back[:3], ink[:3]) > 7
    assert sum(seen["light"][0][:3]) > 600 > 200 > sum(seen["dark"][0][:3])


def contrast(one, other):
    def luminance(color):
        linear = [
            c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4
            for c in (channel / 255 for channel in color)
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_an_answer_can_be_stopped_with_escape(browser, launch):
    from selenium.webdriver.common.keys import Keys

    server = launch(stub={"step_seconds": 0.05, "quick": True})
    browser.get(server.url)
    wait(lambda: text(browser, "state") == "ready")
    keys(browser, "Tell me", Keys.ENTER)
    wait(lambda: len(browser.find_elements("css selector", ".turn")[-1].text) > 3)
    keys(browser, Keys.ESCAPE)
    wait(lambda: value_of(browser, "finish reason") == "stopped")
    server.wait_idle(5)


def test_a_key_is_asked_for(browser, launch):
    server = launch("--api-key=secret")
    browser.get(server.url)
    wait(lambda: "needs an API key" in text(browser, "state"))
    assert not browser.find_element("id", "blocks").is_displayed()
    browser.find_element("id", "key").send_keys("secret")
    wait(lambda: text(browser, "model"))
    wait(lambda: browser.find_element("id", "blocks").is_displayed())
