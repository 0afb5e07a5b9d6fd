"""`mugrpo rollouts`: describe the responses that a run generated."""

import argparse

from mugrpo_jax.cli import arguments as shared

_CHOOSE = -1  # `--history` without a number


def add(commands: shared.Commands) -> None:
    """Add `mugrpo rollouts` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "rollouts",
        run,
        help="describe the responses that a run generated",
        more="Shows counts, lengths, rewards, finish reasons, scoring statuses and sample texts. With "
        "--history, shows one response token by token at every kept checkpoint of its stage. RUN may also be "
        "a stage that `mugrpo rollouts import` made.",
        example="mugrpo rollouts runs/first --stage 0 --show 5 --reward 1:1",
    )
    shared.add_source_run(parser)
    parser.add_argument(
        "--stage",
        type=shared.at_least(0),
        help="index of one stage, from 0 (default: all; with --history: the first)",
    )
    parser.add_argument(
        "--show", type=shared.at_least(0), default=0, metavar="K", help="print K responses of each stage"
    )
    parser.add_argument("--model", help="with --show and an imported stage: a model with its tokenizer")
    parser.add_argument("--reward", type=_interval, metavar="LOW:HIGH", help="only rewards from LOW to HIGH")
    parser.add_argument(
        "--history",
        type=shared.at_least(0),
        nargs="?",
        const=_CHOOSE,
        metavar="N",
        help="follow response N of the stage through its updates (default N: a response with negative "
        "advantage whose trigger has the longest suffix)",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=shared.path,
        metavar="FILE",
        help="with --history: also draw a map of the tokens, .png, .svg, .pdf or .html",
    )


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo rollouts` with the parsed arguments."""
    if arguments.history is not None:
        _show_history(arguments)
        return
    if arguments.out is not None:
        raise ValueError("-o: draws the history of one response; add --history")
    from mugrpo_jax.report import describe_rollouts

    chosen = {"stage": arguments.stage, "show": arguments.show, "rewards": arguments.reward}
    print(describe_rollouts(arguments.source, **chosen, model=arguments.model))


def _show_history(arguments: argparse.Namespace) -> None:
    from mugrpo_jax.report.token_history import token_history
    from mugrpo_jax.report.token_map import check_ending, history_text, write_map

    if arguments.out is not None:
        check_ending(arguments.out)
    number = None if arguments.history == _CHOOSE else arguments.history
    history = token_history(arguments.source, stage=arguments.stage, response=number)
    print(history_text(history))
    if arguments.out is not None:
        write_map(history, arguments.out)
        print(f"\nmap: {arguments.out}")


def _interval(text: str) -> tuple[float, float]:
    low, colon, high = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return float(low or "-inf"), float(high or "inf")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: expected LOW:HIGH, such as 0.5:1") from None
