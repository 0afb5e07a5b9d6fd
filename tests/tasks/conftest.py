import sys
from pathlib import Path

import pytest

from mugrpo_jax.tasks import Problem


@pytest.fixture
def problem():
    return Problem("p1", ({"role": "user", "content": "What?"},), "42")


@pytest.fixture(scope="session", autouse=True)
def helpers_on_the_path():
    sys.path.insert(0, str(Path(__file__).parent))
    yield
    sys.path.remove(str(Path(__file__).parent))
