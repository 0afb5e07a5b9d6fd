"""µ-GRPO for JAX: reinforcement learning for language models on very stale rollouts.

Three lines generate responses:

>>> import mugrpo_jax
>>> model = mugrpo_jax.load_model("tiny")  # or a Hugging Face folder, a .gguf file, a name on the Hub
>>> [response] = mugrpo_jax.generate(model, ["1+1="], max_tokens=8, progress=False)
>>> len(response["tokens"]) <= 8
True

`load_config` and `train` run an experiment. `objectives` has the losses, which are pure functions of arrays.
Only `objectives` works without the extra `train` (`pip install 'mugrpo-jax[train]'`).
Each name is imported when it is first used, so that `import mugrpo_jax` is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mugrpo_jax import objectives as objectives
    from mugrpo_jax.config import load as load_config
    from mugrpo_jax.loop import train as train
    from mugrpo_jax.models import load_model as load_model
    from mugrpo_jax.sampling import generate as generate

__version__ = "0.1.0"
__all__ = ["__version__", "generate", "load_config", "load_model", "objectives", "train"]

_PLACES = {  # module:attribute, or a module
    "generate": "mugrpo_jax.sampling:generate",
    "load_config": "mugrpo_jax.config:load",
    "load_model": "mugrpo_jax.models:load_model",
    "objectives": "mugrpo_jax.objectives",
    "train": "mugrpo_jax.loop:train",
}

if not TYPE_CHECKING:  # a type checker must not believe that every name exists

    def __getattr__(name: str) -> Any:
        if name not in _PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = _PLACES[name].partition(":")
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError as error:
            from mugrpo_jax import training_packages

            if (error.name or "").partition(".")[0] in training_packages.MODULES:
                training_packages.check_installed(f"{__name__}.{name}")
            raise
        globals()[name] = getattr(found, attribute) if attribute else found
        return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
