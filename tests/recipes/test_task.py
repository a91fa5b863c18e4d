"""The local recipe's task: what is right, and what an answer earns."""

import random

from recipes.local import task


def test_prompts_have_the_announced_length_and_symbols() -> None:
    prompt = task.draw_prompt(random.Random(0))
    assert len(prompt) == task.PROMPT_TOKENS
    assert len(task.answer(prompt)) == task.ANSWER_TOKENS
    assert (prompt[0], prompt[-1]) == (task.BOS, task.SEP)
    assert set(prompt[1:-1]) <= set(task.SYMBOLS)
    assert max(task.SYMBOLS) < task.VOCAB


def test_only_the_whole_answer_is_exact_and_earns_everything() -> None:
    prompt = [task.BOS, 5, 4, 9, 9, 3, 12, 7, 7, 6, 8, task.SEP]
    right = [3, 4, 5, 6, 7, 7, 8, 9, 9, 12, task.EOS]
    assert task.answer(prompt) == right
    assert task.exact(prompt, right)
    assert task.reward(prompt, right) == 1.0
    for wrong in (right[:-1], [*right, 3], right[::-1], []):
        assert not task.exact(prompt, wrong)
        assert task.reward(prompt, wrong) < 1.0


def test_a_reward_is_the_share_of_right_positions() -> None:
    prompt = [task.BOS, *[3] * 9, 4, task.SEP]
    assert task.reward(prompt, [3] * 9 + [5, task.EOS]) == 10 / 11
    assert task.reward(prompt, [3] * 12) == 9 / 12
    assert task.reward(prompt, []) == 0.0
