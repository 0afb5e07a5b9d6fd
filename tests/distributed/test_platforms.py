"""Devices that JAX should not look for, or cannot find."""

import importlib.util
import os
import subprocess
import sys

import jax
import pytest

from mugrpo_jax.distributed.platforms import missing_platform, without_missing_tpu


@pytest.mark.parametrize(
    ("asked", "plugins", "chips", "wanted"),
    [
        (None, None, False, "cpu"),  # a laptop
        ("tpu", None, False, None),  # the user knows better
        (None, object(), False, None),  # GPUs may be there
        (None, None, True, None),  # a TPU
    ],
)
def test_a_tpu_is_not_looked_for_on_a_machine_without_one(monkeypatch, asked, plugins, chips, wanted):
    set_to = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: set_to.append((name, value)))
    monkeypatch.setattr(type(jax.config), "jax_platforms", asked, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: plugins)
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    if not chips:
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    without_missing_tpu()
    assert set_to == ([("jax_platforms", wanted)] if wanted else [])


def test_devices_that_are_not_there_are_named_in_one_line():
    assert missing_platform() == ""  # the tests run on the CPU
    environment = os.environ | {"JAX_PLATFORMS": "nowhere"}
    command = [sys.executable, "-m", "mugrpo_jax", "generate", "--model", "tiny", "--prompt", "1+1="]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2 and line.startswith("mugrpo: JAX_PLATFORMS=nowhere: JAX finds no such device")
