"""The installed package: what it depends on, what the wheel has, and what works with the core alone."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from setuptools.dist import Distribution  # setuptools must be imported before distutils, which it replaces

import mugrpo_jax
from mugrpo_jax import training_packages

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CORE = ("jax", "jaxlib", "ml_dtypes", "numpy", "numpy.libs", "opt_einsum", "scipy", "scipy.libs")


def names(requirements):
    return sorted(re.split(r"[<>=\[; ]", requirement)[0] for requirement in requirements)


@pytest.fixture(scope="module")
def core(tmp_path_factory):
    """Runs Python where only jax, what it needs, and this package can be imported."""
    folder = tmp_path_factory.mktemp("core")
    site = Path(find_spec("jax").origin).parents[1]
    for name in CORE:
        if (site / name).exists():  # some systems have no numpy.libs
            (folder / name).symlink_to(site / name)
    (folder / "mugrpo_jax").symlink_to(ROOT / "mugrpo_jax")
    environment = {**os.environ, "PYTHONPATH": str(folder), "JAX_PLATFORMS": "cpu"}

    def run(*arguments):
        # -S: without the site-packages of this environment
        command = [sys.executable, "-S", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)

    return run


def test_the_core_needs_jax_and_numpy_alone():
    assert names(PROJECT["dependencies"]) == ["jax", "numpy"]
    assert names(EXTRAS["train"]) == sorted(training_packages.MODULES.values())
    assert "extras=train${1:+,$1}\n" in (ROOT / "scripts" / "setup").read_text()


def test_the_losses_work_with_the_core_and_import_fast(core):
    code = """
import sys, time
import jax
before = time.process_time()
import mugrpo_jax.objectives
print(time.process_time() - before)
x = jax.ShapeDtypeStruct((2, 3), "float32")
loss, metrics = jax.eval_shape(mugrpo_jax.objectives.mu_grpo, x, x, x, x)  # traced, not compiled
assert loss.shape == () and metrics
rooms = {name.split(".")[1] for name in sys.modules if name.startswith("mugrpo_jax.")}
assert rooms == {"objectives"}, rooms
try:
    mugrpo_jax.load_config
except ModuleNotFoundError as error:
    print(error)
"""
    done = core("-c", code)
    assert done.returncode == 0, done.stderr
    seconds, error = done.stdout.splitlines()
    assert float(seconds) < 0.2  # more than jax itself
    assert error == (
        "mugrpo_jax.load_config: not installed: array-record, bokeh, grain and 10 more; "
        "run: pip install 'mugrpo-jax[train]'"
    )


def test_a_command_without_the_extra_gives_one_line_with_the_remedy(core, tmp_path):
    done = core("-m", "mugrpo_jax", "train", "quickstart", "--out", str(tmp_path / "run"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "mugrpo train: not installed: array-record, bokeh, grain and 10 more; "
        "run: pip install 'mugrpo-jax[train]'\n"
    )
    assert not (tmp_path / "run").exists()
    assert "usage: mugrpo" in core("-m", "mugrpo_jax", "--help").stdout


def test_one_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(training_packages, "MODULES", {"yaml": "pyyaml", "no_such_thing": "no-such-thing"})
    with pytest.raises(ModuleNotFoundError, match=r"^it: not installed: no-such-thing; run: pip install"):
        training_packages.check_installed("it")


def test_the_wheel_has_every_config(tmp_path, monkeypatch):
    from distutils.core import run_setup

    monkeypatch.chdir(ROOT)
    made = run_setup("setup.py", stop_after="init")
    build = made.cmdclass["build_py"](Distribution({"packages": [], "name": "x"}))
    build.ensure_finalized()
    build.build_lib = str(tmp_path)
    build.run()
    built, written = (
        {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.yaml")}
        for folder in (tmp_path / "mugrpo_jax" / "configs", ROOT / "configs")
    )
    assert built == written and "quickstart.yaml" in built
    assert (ROOT / "MANIFEST.in").read_text() == "graft configs\n"  # for the source distribution


@pytest.mark.parametrize("base", ["https://example.org/team/mugrpo_jax", None])
def test_the_readme_of_the_wheel_has_absolute_links(monkeypatch, base):
    from distutils.core import run_setup

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MUGRPO_JAX_URL", f"{base}.git" if base else "/a/folder")
    made = run_setup("setup.py", stop_after="init").metadata
    links = re.findall(r"\]\(([^)]+)\)", made.long_description)
    local = [link for link in links if not link.startswith("https://")]
    if base is None:
        assert made.long_description == (ROOT / "README.md").read_text() and not made.project_urls
        return
    assert not local and made.project_urls["Source"] == base
    own = [link.removeprefix(base) for link in [*links, *made.project_urls.values()] if link.startswith(base)]
    paths = [re.sub(r"^/(?:blob|raw)/main/|#.*", "", link) for link in own if link not in ("", "/issues")]
    assert len(paths) > 10 and all((ROOT / path).exists() for path in paths)
    assert f"{base}/raw/main/docs/results/quickstart/methods.png" in links


def test_version_license_and_authors_are_the_same_everywhere():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == PROJECT["version"] == mugrpo_jax.__version__
    assert cited["license"] == PROJECT["license"]
    assert cited["authors"] == PROJECT["authors"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()
    assert "scripts/test" in (ROOT / "CONTRIBUTING.md").read_text()


def test_the_code_host_runs_the_test_command():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text())
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert [step["run"] for step in steps if "run" in step] == ["scripts/test"]
    forms = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
    assert len(forms) >= 2
    for form in forms:
        shown = yaml.safe_load(form.read_text())
        assert {"name", "description", "body"} <= set(shown), form.name


@pytest.mark.parametrize(("name", "extra"), [("gpu", "cuda"), ("tpu", "tpu")])
def test_the_images_install_extras_that_exist(name, extra):
    text = (ROOT / "docker" / f"{name}.Dockerfile").read_text()
    [installed] = re.findall(r"pip install .*'\.\[([\w,]+)\]'", text)
    assert set(installed.split(",")) == {"train", extra} and set(installed.split(",")) <= set(EXTRAS)
    for line in re.findall(r"^COPY (.*) \S+$", text, re.M):
        assert all((ROOT / path).exists() for path in line.split())
