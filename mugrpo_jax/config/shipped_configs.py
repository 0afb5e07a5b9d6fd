"""Find the configs that come with the package, such as `quickstart`.

They live in the folder `configs` of the repository. `setup.py` copies this folder into the wheel.
"""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_PLACES = (_PACKAGE / "configs", _PACKAGE.parent / "configs")  # in a wheel, in a checkout


def files() -> dict[str, Path]:
    """Return the files of all shipped configs by name: the path in `configs` without `.yaml`.

    >>> list(files())[:2]
    ['quickstart', 'arithmetic']
    """
    folder = next((place for place in _PLACES if place.is_dir()), _PLACES[0])
    found = {path.relative_to(folder).with_suffix("").as_posix(): path for path in folder.rglob("*.yaml")}
    return {name: found[name] for name in sorted(found, key=_place)}


def _place(name: str) -> tuple[int, bool, str]:
    """The quickstart comes first, then the other configs by depth and name."""
    return name.count("/"), name != "quickstart", name
