"""A browser for all tests of the page, if one is installed."""

import pytest
from browser import PATH, Browser


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    if PATH is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    opened = Browser(tmp_path_factory.mktemp("browser"))
    opened.resize(1280, 900)
    yield opened
    opened.close()
