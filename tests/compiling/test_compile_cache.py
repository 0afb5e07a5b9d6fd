"""The cache of compiled programs: where it is, and that a program in it is not compiled again."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from mugrpo_jax.compiling.compile_cache import use_compile_cache

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_enable_compilation_cache",
)


@pytest.fixture
def untouched(monkeypatch, tmp_path):
    """JAX without a cache, as in a new process with one device, and a user's cache folder of our own."""
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_compilation_cache_max_size", -1)
    compilation_cache.reset_cache()  # it may be open at its old place
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    yield tmp_path
    compilation_cache.reset_cache()
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_folder_is_in_the_users_cache_with_one_part_per_kind_of_cpu(untouched):
    folder = use_compile_cache()
    assert folder.parent == untouched / "cache" / "mugrpo_jax" / "programs" and folder.is_dir()
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_compilation_cache_max_size > 0  # not without bound


def test_what_the_user_told_jax_holds(untouched):
    jax.config.update("jax_compilation_cache_dir", str(untouched / "mine"))
    assert use_compile_cache() == use_compile_cache("elsewhere") == untouched / "mine"
    assert not (untouched / "cache").exists()


def test_several_cpu_devices_have_no_cache_unless_the_user_names_a_folder(untouched, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert use_compile_cache() is None
    assert jax.config.jax_compilation_cache_dir is None and not (untouched / "cache").exists()
    assert use_compile_cache(str(untouched / "mine")).parent == untouched / "mine"


def test_several_accelerators_have_a_cache(untouched, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert use_compile_cache().is_dir()


def test_off_means_that_nothing_is_kept(untouched):
    assert use_compile_cache("off") is None
    assert jax.config.jax_compilation_cache_dir is None and not jax.config.jax_enable_compilation_cache


def test_without_a_writable_folder_a_run_goes_on_unless_the_folder_was_asked_for(untouched):
    (untouched / "cache").write_text("a file")
    assert use_compile_cache() is None
    with pytest.raises(OSError, match=r"compile_cache: .*cache: Not a directory; use another folder or off"):
        use_compile_cache(str(untouched / "cache"))


def test_a_program_that_is_there_is_not_compiled_again(untouched, monkeypatch):
    found = []
    listen = lambda event, **_: found.append(event)  # noqa: E731
    jax.monitoring.register_event_listener(listen)
    folder = use_compile_cache(str(untouched / "programs"))
    try:
        for _ in range(2):
            jax.clear_caches()
            jax.jit(lambda x: x * 3.25 + 1)(2.0).block_until_ready()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    assert any(folder.iterdir())
    assert found.count("/jax/compilation_cache/cache_hits") >= 1
