"""Devices that JAX should not look for, or cannot find."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import jax
import pytest

from mugrpo_jax.distributed.platforms import missing_platform, without_missing_tpu


@pytest.mark.parametrize(
    ("asked", "variables", "package", "entry_points", "wanted"),
    [
        (None, {"TPU_SKIP_MDS_QUERY": "1"}, None, [], "cpu"),  # a laptop: JAX has set the variable
        ("tpu", {"TPU_SKIP_MDS_QUERY": "1"}, None, [], None),  # the user knows better
        ("tpu,cpu", {"TPU_SKIP_MDS_QUERY": "true"}, None, [], None),  # a TPU host of Kubernetes
        (None, {}, None, [], None),  # chips, but no libtpu
        (None, {"TPU_SKIP_MDS_QUERY": "1"}, object(), [], None),  # GPUs may be there, or others:
        (None, {"TPU_SKIP_MDS_QUERY": "1"}, None, ["plugin"], None),
        (None, {"TPU_SKIP_MDS_QUERY": "1", "PJRT_NAMES_AND_LIBRARY_PATHS": "a:a.so"}, None, [], None),
    ],
)
def test_a_tpu_is_not_looked_for_on_a_machine_without_one(
    monkeypatch, asked, variables, package, entry_points, wanted
):
    set_to = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: set_to.append((name, value)))
    monkeypatch.setattr(type(jax.config), "jax_platforms", asked, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: package)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entry_points)
    for name in ("TPU_SKIP_MDS_QUERY", "PJRT_NAMES_AND_LIBRARY_PATHS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    without_missing_tpu()
    assert set_to == ([("jax_platforms", wanted)] if wanted else [])


def test_devices_that_are_not_there_are_named_in_one_line():
    assert missing_platform() == ""  # the tests run on the CPU
    environment = os.environ | {"JAX_PLATFORMS": "nowhere"}
    command = [sys.executable, "-m", "mugrpo_jax", "generate", "--model", "tiny", "--prompt", "1+1="]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2 and line.startswith("mugrpo: JAX_PLATFORMS=nowhere: JAX finds no such device")
