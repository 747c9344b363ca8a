"""One browser for all tests of the page, and one demo server for most."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from selenium import webdriver

from tests.end_to_end.demo_server import Server, start
from tests.page.browser import start_browser


@pytest.fixture(scope="package")
def driver() -> Iterator[webdriver.Chrome]:
    driver = start_browser()
    yield driver
    driver.quit()


@pytest.fixture(scope="package")
def demo() -> Iterator[Server]:
    server = start()
    yield server
    assert server.stop() == 0
