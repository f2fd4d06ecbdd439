from benchmarks.levels import SMOOTHED_STEPS, reached_step


def test_reached_is_the_first_step_whose_window_is_there() -> None:
    means = {step: 0.0 if step < 10 else 0.6 for step in range(1, 30)} | {20: 0.0}
    assert reached_step(means, level=0.6) == 10
    assert reached_step(means, level=0.7) is None


def test_windows_that_begin_before_the_run_do_not_count() -> None:
    means = dict.fromkeys(range(1, SMOOTHED_STEPS), 1.0)
    assert reached_step(means, level=0.5) is None
    assert reached_step(means | {SMOOTHED_STEPS: 1.0}, level=0.5) == SMOOTHED_STEPS


def test_a_step_in_which_nothing_was_scored_is_passed_over() -> None:
    assert reached_step({9: 0.3, 12: 0.6}, level=0.5) == 12
