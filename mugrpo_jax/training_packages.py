"""Tell the user which package is missing if only the core is installed.

The core (`pip install mugrpo-jax`) has the losses and needs jax and numpy. Models, runs and all commands need
the extra `train`.
"""

import importlib.util

INSTALL = "pip install 'mugrpo-jax[train]'"
# The names by which the packages of the extra `train` in pyproject.toml are imported, and the packages.
MODULES = {
    "array_record": "array-record",
    "bokeh": "bokeh",
    "grain": "grain",
    "huggingface_hub": "huggingface-hub",
    "jinja2": "jinja2",
    "math_verify": "math-verify",
    "matplotlib": "matplotlib",
    "msgpack": "msgpack",
    "optax": "optax",
    "orbax": "orbax-checkpoint",
    "tqdm": "tqdm",
    "transformers": "transformers",
    "yaml": "pyyaml",
}


def check_installed(what: str) -> None:
    """Raise an error with the remedy if a package that `what` needs is not installed; import nothing."""
    missing = [package for module, package in MODULES.items() if importlib.util.find_spec(module) is None]
    if missing:
        named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModuleNotFoundError(f"{what}: not installed: {named}; run: {INSTALL}")
