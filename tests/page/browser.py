"""The page in a real browser: headless Chromium, driven by Selenium.

Without a browser these tests fail, with a message that names the packages to install.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")
POLL_S = 0.05  # each look takes 10 ms of CPU time in three processes
MISSING = "the page's tests need Chromium: apt-get install -y chromium chromium-driver"
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
PROGRAMS = (("chromium", "chromium-browser", "google-chrome"), ("chromedriver",))


def start_browser(*more: str) -> webdriver.Chrome:
    """Return a driver with `more` options. Fail the test if browser or driver is missing."""
    browser, driver = (
        next((path for name in names if (path := shutil.which(name))), None) for names in PROGRAMS
    )
    if browser is None or driver is None:
        pytest.fail(MISSING, pytrace=False)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for option in (*OPTIONS, "--window-size=1280,900", *more):
        options.add_argument(option)
    return webdriver.Chrome(options=options, service=Service(driver))


class Page:
    """A server's page in a tab without history, and the actions of a visitor."""

    def __init__(self, driver: webdriver.Chrome, url: str, view: str = "#talk") -> None:
        self.driver = driver
        self.url = url
        driver.get("about:blank")  # the previous page stores its conversation when it closes
        driver.get(f"{url}/page/theme.css")
        driver.execute_script("sessionStorage.clear()")
        self.resize(1280, 900)
        driver.get_log("browser")
        driver.get(f"{url}/{view}")

    def resize(self, width: int, height: int, touch: bool = False) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": touch}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.driver.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": touch})

    def reload(self) -> None:
        self.driver.refresh()

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str) -> WebElement:
        """Wait for matching elements and return the last one."""
        return self.until(lambda: self.all(css))[-1]

    def text(self, css: str) -> str:
        """Return the text of the last match, even if it is folded."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        texts = self.until(lambda: self.driver.execute_script(script, css))
        return str(texts[-1])

    def each(self, css: str, expression: str = "one.textContent") -> list[Any]:
        """Return the value of a JavaScript expression of `one` for each match."""
        script = f"return [...document.querySelectorAll(arguments[0])].map((one) => {expression})"
        return self.driver.execute_script(script, css)

    def pause(self, seconds: float) -> None:
        """Wait while the page runs."""
        time.sleep(seconds)

    def change_requests(self, fields: str) -> None:
        """Add fields, written as a JavaScript object, to each request's body."""
        self.driver.execute_script(
            "const send = window.fetch; window.fetch = (path, options) => send(path, options?.body"
            f" ? {{...options, body: JSON.stringify({{...JSON.parse(options.body), ...{fields}}})}}"
            " : options)"
        )

    def until(self, check: Callable[[], T], timeout_s: float = 20.0) -> T:
        """Wait for a true result of `check` and return it."""
        deadline = time.monotonic() + timeout_s
        while not (found := check()):
            assert time.monotonic() < deadline, f"it never came true; {self.complaints()}"
            time.sleep(POLL_S)
        return found

    def say(self, text: str) -> None:
        self.one("#prompt").send_keys(text, Keys.ENTER)

    def answered(self, number: int = 1) -> None:
        """Wait for `number` answers, the last of them complete."""
        turns = ".turn.assistant"
        self.until(lambda: len(self.all(turns)) == number and not self.all(f"{turns}[aria-busy]"))

    def set(self, name: str, value: str) -> None:
        """Set a field of the settings."""
        script = "arguments[0].closest('details').open = true; arguments[0].value = arguments[1]"
        self.driver.execute_script(script, self.one(f"#set-{name}"), value)

    def press(self, text: str) -> None:
        """Click the last visible button with this text."""
        script = """
            const all = [...document.querySelectorAll('button')].filter((one) =>
                one.textContent === arguments[0] && one.offsetParent !== null);
            all.at(-1)?.click();
            return all.length;
        """
        self.until(lambda: self.driver.execute_script(script, text))

    def run(self, script: str) -> Any:
        return self.driver.execute_script(script)

    def complaints(self) -> list[str]:
        """Return the console's messages: errors and violations of the content security policy."""
        lines = [entry["message"] for entry in self.driver.get_log("browser")]
        # Reading canvases in tests causes the first. A browser that is slow to read the page asks
        # for the second, although the page has an icon.
        harmless = "willReadFrequently", "/favicon.ico - Failed to load"
        return [line for line in lines if not any(text in line for text in harmless)]
