"""Chunks of prompts are sized by measured step times; here the times are made up."""

from __future__ import annotations

import random

import pytest

from flashstep.pace import CAUTIOUS_ROWS, LEAST_ROWS, StepTimes


def taught(seconds, sizes, noise: float = 0.0) -> StepTimes:
    times, draws = StepTimes(), random.Random(0)
    for rows in sizes:
        times.note(rows, seconds(rows) * (1 + noise * draws.uniform(-1, 1)))
    return times


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_line_is_learned_and_its_slowdown_kept(noise):
    def seconds(rows: int) -> float:
        return 0.020 + 0.001 * rows

    times = taught(seconds, [6, 22, 6, 40, 6, 6, 60] * 10, noise)
    extra = times.extra_rows(6, 2.0)
    assert seconds(6 + extra) / seconds(6) == pytest.approx(2.0, rel=0.03 + 2 * noise)
    # Many decoding rows take longer by themselves, so more may join them.
    assert times.extra_rows(100, 2.0) > extra


def test_what_is_unknown_is_tried_with_care():
    assert StepTimes().extra_rows(6, 2.0) == CAUTIOUS_ROWS
    assert taught(lambda rows: 0.02, [6] * 20).extra_rows(6, 2.0) == CAUTIOUS_ROWS
    assert taught(lambda rows: 0.02 - 0.0001 * rows, [6, 12] * 20).extra_rows(6, 2.0) == CAUTIOUS_ROWS


def test_a_prompt_always_advances():
    assert taught(lambda rows: 0.01 * rows, [6, 60] * 20).extra_rows(6, 1.01) == LEAST_ROWS


def test_old_times_are_forgotten():
    times = taught(lambda rows: 0.020 + 0.010 * rows, [6, 60] * 50)
    slow = times.extra_rows(6, 2.0)
    for rows in [6, 60] * 200:
        times.note(rows, 0.020 + 0.001 * rows)
    assert times.extra_rows(6, 2.0) > 2 * slow
