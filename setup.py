"""Build the wheel: copy `configs` into it, and make the links of its README absolute.

Everything else is in pyproject.toml. The address of the public repository is that of git's remote `origin`,
or `MUGRPO_JAX_URL` if it is set. Without such an address, the README keeps its relative links.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent


class BuildWithConfigs(build_py):
    """Build the package with its configs; an editable install reads them in the checkout."""

    def run(self) -> None:
        """Build the package, then copy the configs."""
        super().run()
        if not getattr(self, "editable_mode", False):
            target = Path(self.build_lib) / "mugrpo_jax" / "configs"
            shutil.rmtree(target, ignore_errors=True)  # of an older build
            shutil.copytree(ROOT / "configs", target)


def address() -> str | None:
    """Return the address of the repository on the web, without `.git` at its end; None if it has none."""
    command = ["git", "-C", str(ROOT), "remote", "get-url", "origin"]
    try:
        remote = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # without git
        remote = ""
    found = os.environ.get("MUGRPO_JAX_URL", remote)
    return found.removesuffix("/").removesuffix(".git") if found.startswith("https://") else None


def readme(base: str | None) -> str:
    """Return the README with absolute links and images, because an index of packages has no other files."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if base is None:
        return text
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?://|#)", rf"\g<1>{base}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?://|#)", rf"\g<1>{base}/blob/main/", text)


def urls(base: str | None) -> dict[str, str]:
    """Return the links that an index of packages shows beside the README."""
    if base is None:
        return {}
    places = {"Source": "", "Documentation": "/blob/main/docs/index.md", "Changes": "/blob/main/CHANGELOG.md"}
    return {name: base + place for name, place in places.items()} | {"Issues": f"{base}/issues"}


setup(
    cmdclass={"build_py": BuildWithConfigs},
    long_description=readme(address()),
    long_description_content_type="text/markdown",
    project_urls=urls(address()),
)
