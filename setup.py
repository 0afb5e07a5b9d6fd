"""Copy `configs` into the wheel as `mugrpo_jax/configs`; everything else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigs(build_py):
    """Build the package with its configs; an editable install reads them in the checkout."""

    def run(self) -> None:
        """Build the package, then copy the configs."""
        super().run()
        if not getattr(self, "editable_mode", False):
            target = Path(self.build_lib) / "mugrpo_jax" / "configs"
            shutil.rmtree(target, ignore_errors=True)  # of an older build
            shutil.copytree(Path(__file__).parent / "configs", target)


setup(cmdclass={"build_py": BuildWithConfigs})
