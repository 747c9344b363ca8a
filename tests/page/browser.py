"""The page in a real browser: Chromium without a window, driven by Selenium.

No test of these passes without one: a machine that has none says what to install.
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
MISSING = "the page's tests need Chromium: apt-get install -y chromium chromium-driver"
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")
PROGRAMS = (("chromium", "chromium-browser", "google-chrome"), ("chromedriver",))


def start_browser(*more: str) -> webdriver.Chrome:
    """Start one with `more` options.

    Fails the test with one line where there is no browser, or no driver for it.
    """
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
    """One server's page, opened anew; what a visitor sees and does there."""

    def __init__(self, driver: webdriver.Chrome, url: str, view: str = "") -> None:
        self.driver = driver
        self.url = url
        driver.get("about:blank")
        driver.get_log("browser")
        driver.get(f"{url}/{view}")

    def all(self, css: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def one(self, css: str) -> WebElement:
        """The last one of them, waited for."""
        return self.until(lambda: self.all(css))[-1]

    def text(self, css: str) -> str:
        """What the last one of them says, folded or not."""
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        texts = self.until(lambda: self.driver.execute_script(script, css))
        return str(texts[-1])

    def until(self, check: Callable[[], T], timeout_s: float = 20.0) -> T:
        """What `check` returns once it is true."""
        deadline = time.monotonic() + timeout_s
        while not (found := check()):
            assert time.monotonic() < deadline, f"it never came true; {self.complaints()}"
            time.sleep(0.02)
        return found

    def say(self, text: str) -> None:
        self.one("#prompt").send_keys(text, Keys.ENTER)

    def answered(self, number: int = 1) -> None:
        """Wait until so many answers have been given, and the last one to its end."""
        turns = ".turn.assistant"
        self.until(lambda: len(self.all(turns)) == number and not self.all(f"{turns}[aria-busy]"))

    def set(self, name: str, value: str) -> None:
        """A field of the settings, as if it had been typed there."""
        script = "arguments[0].closest('details').open = true; arguments[0].value = arguments[1]"
        self.driver.execute_script(script, self.one(f"#set-{name}"), value)

    def press(self, text: str) -> None:
        """The last button that says so and can be seen."""

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
        """What the browser had to say of the page: errors, and what its policy refused."""
        said = [entry["message"] for entry in self.driver.get_log("browser")]
        return [line for line in said if "willReadFrequently" not in line]  # tests read canvases
