"""`mugrpo rollouts`: describe the responses that a run generated."""

import argparse

from mugrpo_jax.cli import arguments as shared


def add(commands: shared.Commands) -> None:
    """Add `mugrpo rollouts` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "rollouts",
        run,
        help="describe the responses that a run generated",
        more="Shows counts, lengths, rewards, finish reasons, scoring statuses and sample texts.",
        example="mugrpo rollouts runs/first --stage 0 --show 5 --reward 1:1",
    )
    shared.add_source_run(parser)
    parser.add_argument("--stage", type=shared.at_least(0), help="index of one stage, from 0 (default: all)")
    parser.add_argument(
        "--show", type=shared.at_least(0), default=0, metavar="K", help="print K responses of each stage"
    )
    parser.add_argument("--reward", type=_interval, metavar="LOW:HIGH", help="only rewards from LOW to HIGH")


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo rollouts` with the parsed arguments."""
    from mugrpo_jax.report import describe_rollouts

    chosen = {"stage": arguments.stage, "show": arguments.show, "rewards": arguments.reward}
    print(describe_rollouts(arguments.source, **chosen))


def _interval(text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return float(low or "-inf"), float(high or "inf")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected LOW:HIGH, such as 0.5:1") from None
