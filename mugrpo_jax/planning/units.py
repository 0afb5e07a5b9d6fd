"""Write counts and bytes as text."""


def count(number: int, noun: str, plural: str | None = None) -> str:
    """Write a number with its noun.

    >>> count(1, "stage"), count(2, "micro-batch", "micro-batches")
    ('1 stage', '2 micro-batches')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def human(number: float | None) -> str:
    """Write a number of bytes as text, with units in powers of 1000.

    >>> human(3_200_000), human(141e9)
    ('3.2 MB', '141 GB')
    """
    number = number or 0
    unit = next(u for u in (1e15, 1e12, 1e9, 1e6, 1e3, 1) if number >= u or u == 1)
    name = {1e15: "PB", 1e12: "TB", 1e9: "GB", 1e6: "MB", 1e3: "kB", 1: "B"}[unit]
    return f"{number / unit:.3g} {name}"


def human_share(used: float, whole: float) -> str:
    """Write how many bytes of a whole are in use. The unit is written once if both have the same.

    >>> human_share(13.1e9, 16e9), human_share(24e6, 16e9)
    ('13.1 of 16 GB', '24 MB of 16 GB')
    """
    number, unit = human(used).split()
    return (
        f"{number} of {human(whole)}"
        if human(whole).endswith(f" {unit}")
        else f"{human(used)} of {human(whole)}"
    )
