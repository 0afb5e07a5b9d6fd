"""Eight CPU devices for every test, and programs compiled in a hurry; set before jax is imported."""

import contextlib
import gc
import os

import quick_programs

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # parallel test processes compile for TPU
# The processes of a test run share what they compile. JAX would keep only programs that took a second.
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ |= quick_programs.THREADS
# Programs in tests are small and run a few times: optimising them takes longer than running them.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {quick_programs.flags()}"
)

import jax  # after its settings
import pytest
from fake_gcs import FakeGcs
from jaxlib import xla_client

from mugrpo_jax.cli.streams import drop

xla_client.CompileOptions()  # XLA reads its flags here, once
# libtpu reads them later, when it compiles, and ends the process at a flag that it does not know.
os.environ["XLA_FLAGS"] = os.environ["XLA_FLAGS"].replace(quick_programs.flags(), quick_programs.COMMON)

# Files whose fixtures cost more than their tests: each runs in one process, where they are made once.
TOGETHER = tuple(
    f"/test_{name}.py"
    for name in (
        *("behaviors", "cli", "distributed", "lag", "lora_runs", "page", "planning", "resume", "sampler"),
        *("samples", "stages", "tpu", "update_statistics", "update_step"),
        *("environment_run", "turns"),
    )
)


def pytest_collection_modifyitems(items):
    """The notebooks are the longest single tests. They start early, so that none runs alone at the end."""
    items.sort(key=lambda item: "test_notebooks.py" not in item.nodeid)
    # What was imported and collected stays. JAX traces make many objects, and each search for cycles among
    # them would look at all of it again.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests are handed to the processes one by one, those of the files above all at once."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFixtures(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file.endswith(TOGETHER) else nodeid

    return ByFixtures(config, log)


@pytest.fixture(scope="session")
def hurried_tpu_compiler():
    """`with hurried_tpu_compiler():` programs for TPUs are compiled in a third of the time.

    They are not optimised, and some have larger temporaries.
    """

    @contextlib.contextmanager
    def hurried():
        before = jax.config.jax_optimization_level
        jax.config.update("jax_optimization_level", "O0")
        try:
            yield
        finally:
            jax.config.update("jax_optimization_level", before)

    return hurried


@pytest.fixture(scope="module")
def program_folder(tmp_path_factory):
    """A folder for the runs of a test file, in which every program that one of them compiles is kept."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {
        "jax_compilation_cache_dir": str(folder / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield folder
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="session")
def _storage_server():
    """One server for all tests of a process, because clients remember its address."""
    with FakeGcs() as server:
        yield server


@pytest.fixture
def bucket(_storage_server, monkeypatch):
    """A stand-in for Google Cloud Storage, empty, which this process and its children use."""
    _storage_server.objects.clear()
    for name, value in _storage_server.environment.items():
        monkeypatch.setenv(name, value)
    return _storage_server


@pytest.fixture
def closed_pipe():
    """A function that returns a stream to a pipe whose reader has ended, as `head` does after a few lines."""
    with contextlib.ExitStack() as opened:

        def make():
            read, write = os.pipe()
            os.close(read)
            stream = opened.enter_context(os.fdopen(write, "w", buffering=1))
            opened.callback(drop, stream)  # what is still in its buffer would fail when it is closed
            return stream

        yield make
