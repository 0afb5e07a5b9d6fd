"""What a run prints while it works."""

from mugrpo_jax.runs import progress


def test_the_numbers_behind_the_bar_change_every_64_responses():
    with progress.bar(200, "stage 0: generate", "resp") as bar:
        for number in range(1, 129):
            progress.show_sampling(
                bar, tokens=10 * number, occupancy=number / 256, rewards=32.0, scored=number - 64
            )
            if number == 64:
                assert "slots=25%, reward=–" in bar.postfix
        assert bar.n == 128 and "slots=50%, reward=0.500" in bar.postfix and "tok/s=" in bar.postfix


def test_the_bar_calls_the_log_ratio_by_its_name():
    assert progress.headline({"reward": 0.5, "gap/tokens": 0.25}) == {
        "reward": "0.500",
        "|log ratio|": "0.250",
    }


def test_a_stage_with_mostly_equal_rewards_says_so(capsys):
    progress.say_equal_groups("stage 0", 32, 64, 0.5)
    assert capsys.readouterr().out == ""
    progress.say_equal_groups("stage 0", 33, 64, 0.02)
    shown = capsys.readouterr().out
    assert shown.startswith(
        "stage 0: in 33 of 64 groups all responses have the same reward (mean of all: 0.020), and these"
    )
    assert "easier problems" in shown
    progress.say_equal_groups("stage 0", 33, 64, 0.98)
    assert "use harder problems" in capsys.readouterr().out


def test_responses_that_could_not_be_scored_are_printed(capsys):
    progress.say_unscored("stage 0", {"ok": 7, "error": 0}, {})
    assert capsys.readouterr().out == ""
    progress.say_unscored("stage 0", {"ok": 7, "timeout": 1}, {"timeout": "problem 3: no verdict"})
    progress.say_unscored("stage 1", {"error": 2, "invalid": 3}, {})
    progress.say_unscored("stage 2", {"ok": 1, "wrong_answer": 2}, {})
    assert capsys.readouterr().out.splitlines() == [
        "stage 0: 1 answer could not be scored; a failed reward counts as 0: timeout × 1 (problem 3: no "
        "verdict)",
        "stage 1: 5 answers could not be scored; a failed reward counts as 0: error × 2, invalid × 3",
        "stage 2: why answers are wrong: wrong_answer × 2",
    ]
