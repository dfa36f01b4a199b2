"""The scripts that tune the rivals of a wave, compare them: settings and speeds by hand."""

import pytest
from experiment import script

from experiments.recurrent_depth import rival_settings as settings
from experiments.recurrent_depth.rival_times import Times, over


@pytest.mark.parametrize("task", settings.TASKS)
@pytest.mark.parametrize("queries", [8, 16, 64])
def test_every_rival_has_equally_many_different_settings(task, queries):
    grid = settings.TASKS[task].grid(queries)
    assert tuple(grid) == settings.RIVALS
    for of in grid.values():
        assert len(of) == len({setting.label() for setting in of}) == 6
    assert sum(setting.baseline for of in grid.values() for setting in of) == 1


def test_the_rule_chooses_by_speed_and_nothing_where_answers_are_lost():
    rows = [
        {"rival": "a", "label": "slow", "keeps_answers": True, "tokens_per_second": 1.0},
        {"rival": "a", "label": "fast", "keeps_answers": True, "tokens_per_second": 2.0},
        {"rival": "a", "label": "wrong", "keeps_answers": False},
        {"rival": "b", "label": "wrong", "keeps_answers": False},
    ]
    assert script("recurrent_depth/tune")["choice"](rows) == {"a": "fast", "b": None}


def test_speeds_leave_out_prompts_where_they_say_so():
    slow = Times([10, 12], [(1.0, 1.0), (1.0, 3.0), (2.0, 2.0)], [1.0, 1.0, 1.0], 20)
    assert slow.passes == [2.0, 4.0, 4.0] and slow.steps == [1.0, 3.0, 3.0]
    assert slow.row()["tokens_per_second"] == 22 / 4 and slow.row()["decode_tokens_per_second"] == 20 / 3
    assert slow.row()["tokens_per_second_range"] == [22 / 4, 22 / 2]
    quick = Times([10, 12], [(0.5, 0.5), (0.5, 1.5), (1.0, 1.0)], [0.5] * 3, 20)
    assert over(quick, slow, "x") == {"x": 2.0, "x_range": [2.0, 2.0]}
