"""Notations of other models' prompts: which are named, and which real prompts are left alone."""

import pytest
from fastar_nodes.runs.syntax import read_as_text


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        ("a (red:1.2) boat", "(red:1.2)"),
        ("((red boat:1.3) at sea:1.1)", "(red boat:1.3)"),
        ("a (red: .5) boat", "(red: .5)"),
        ("a (red:2) boat", "(red:2)"),
        ("(blade runner 2049:1.3)", "(blade runner 2049:1.3)"),
        ("a [cat:dog:0.5]", "[cat:dog:0.5]"),
        ("a cat <lora:add detail:0.8>", "<lora:add detail:0.8>"),
        ("a cat <LyCO:x:1>", "<LyCO:x:1>"),
        ("blurry, embedding:bad-hands", "embedding:bad-hands"),
        ("(embedding:bad:1.2)", "(embedding:bad:1.2)"),
        ("a __animal__ in __places/forest__", "__animal__, __places/forest__"),
        ("a cat BREAK a dog", "BREAK"),
        ("a cat,\nBREAK\na dog", "BREAK"),
    ],
)
def test_a_notation_is_named(prompt, named):
    assert read_as_text([prompt]).startswith(f"The model reads {named} as plain text, because")


@pytest.mark.parametrize(
    "prompt",
    [
        "",
        "a cat (sitting), a dog (small, brown)",
        "a clock (at 10:30) and a sign (16:9)",
        "a verse (John 3:16), note (see: the boat), an age (age:12)",
        "an [old] photo (f/2.8) of ((two)) cats",
        "snake_case_name, _very_ big, a blank ____ and __",
        "a_b__c_d__e",
        "Break of day, a break in the clouds, a coffee BREAK",
        "A SIGN THAT SAYS COFFEE BREAK TIME NOW",
        'a sign "BREAK" in red',
        "the embedding: vectors in space",
        "a <b>bold</b> cat: red, < lora",
        "a smiley :) and (: 3",
    ],
)
def test_a_real_prompt_is_left_alone(prompt):
    assert read_as_text([prompt]) == ""


def test_the_first_three_are_named_each_once_on_one_line():
    said = read_as_text(["(a:1.1) (b:1.2)", "(a:1.1) (c\x1b\n:1.3) (d:1.4)", f"<lora:{'x' * 500}>"])
    assert said.startswith("The model reads (a:1.1), (b:1.2), (c  :1.3) and 2 more as plain text")
    assert len(read_as_text([f"<lora:{'x' * 500}>"])) < 200


def test_a_long_prompt_takes_no_longer_than_its_length():
    """Of a hostile one too: what repeats within a pattern does not repeat around it."""
    for part in ("(", "(a", "(a:", "__a", "a:", " ", "<lora:", "[a:b", "embedding:", '"BREAK '):
        read_as_text([part * 100_000])
        read_as_text(["(" + part * 100_000 + ":x)"])
