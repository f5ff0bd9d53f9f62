"""Word problems with worked answers in the file format of GSM8K, made from a seed.

``python -m environments.word_problems`` wrote the files in ``data``, so that `gsm8k` runs and is tested without a
download. They are easy; for training that means something, give `gsm8k` the real files.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

DATA = Path(__file__).with_name("data")
NUM_TRAIN, NUM_TEST = 400, 100
_NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emeka", "Farah", "Goran", "Hana", "Ines", "Jonas", "Keiko", "Lior")
_THINGS = ("apples", "pencils", "marbles", "stickers", "books", "shells", "tickets", "coins")


def _shopping(draw: random.Random) -> tuple[str, str, int]:
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    number, price, paid = draw.randint(2, 12), draw.randint(2, 15), 200
    cost = number * price
    question = (
        f"{name} buys {number} {thing} for ${price} each and pays with ${paid}. How much change in dollars is due?"
    )
    steps = (
        f"The {thing} cost {number} * {price} = $<<{number}*{price}={cost}>>{cost}.\n"
        f"The change is {paid} - {cost} = $<<{paid}-{cost}={paid - cost}>>{paid - cost}."
    )
    return question, steps, paid - cost


def _sharing(draw: random.Random) -> tuple[str, str, int]:
    first, second = draw.sample(_NAMES, 2)
    thing, each, people, extra = draw.choice(_THINGS), draw.randint(3, 20), draw.randint(3, 9), draw.randint(2, 30)
    total = each * people
    question = (
        f"{first} has {total} {thing} and shares them equally among {people} friends. {second} is one of them and had "
        f"{extra} {thing} before. How many {thing} does {second} have now?"
    )
    steps = (
        f"Each friend gets {total} / {people} = <<{total}/{people}={each}>>{each} {thing}.\n"
        f"{second} has {each} + {extra} = <<{each}+{extra}={each + extra}>>{each + extra} {thing}."
    )
    return question, steps, each + extra


def _working(draw: random.Random) -> tuple[str, str, int]:
    name, rate, hours, days, rent = (
        *(draw.choice(_NAMES), draw.randint(8, 30), draw.randint(2, 8), draw.randint(3, 6)),
        draw.randint(20, 45),
    )
    daily, weekly = rate * hours, rate * hours * days
    question = (
        f"{name} earns ${rate} an hour, works {hours} hours a day on {days} days of a week and pays ${rent} a week for "
        "a bicycle. How many dollars are left after one week?"
    )
    steps = (
        f"A day brings {rate} * {hours} = $<<{rate}*{hours}={daily}>>{daily}.\n"
        f"A week brings {daily} * {days} = $<<{daily}*{days}={weekly}>>{weekly}.\n"
        f"Left are {weekly} - {rent} = $<<{weekly}-{rent}={weekly - rent}>>{weekly - rent}."
    )
    return question, steps, weekly - rent


def make(number: int, seed: str) -> list[dict[str, str]]:
    """``number`` distinct problems, the same for the same seed."""
    draw = random.Random(seed)
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < number:
        question, steps, answer = draw.choice((_shopping, _sharing, _working))(draw)
        rows[question] = {"question": question, "answer": f"{steps}\n#### {answer}"}
    return list(rows.values())


def write(directory: Path) -> None:
    rows = make(NUM_TRAIN + NUM_TEST, "word problems")
    for name, part in (("train", rows[:NUM_TRAIN]), ("test", rows[NUM_TRAIN:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (directory / f"gsm8k_generated_{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    DATA.mkdir(exist_ok=True)
    write(DATA)
