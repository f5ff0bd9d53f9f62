"""The client's shapes of answers are what the API's document says."""

from __future__ import annotations

from typing import get_type_hints

from gspo_core import api_answers, environment_records
from tests.repo import answer_shapes
from tests.repo.shapes import marked


def test_the_file_is_what_the_document_says() -> None:
    assert answer_shapes.FILE.read_text() == answer_shapes.written(), "make docs"


def test_what_a_shape_requires_every_answer_of_the_api_has() -> None:
    document = answer_shapes.schemas()
    missing, known = [], set[str]()
    for name, _, schemas in answer_shapes.shapes(document):
        shape = getattr(api_answers, name)
        hints = get_type_hints(shape, localns=vars(environment_records), include_extras=True)
        required = {key for key, hint in hints.items() if marked(shape, key, hint) == key}
        missing += [f"{name}.{key}" for one in schemas for key in required - set(document[one]["properties"])]
        known |= {f"{name}.{key}" for key in hints}
    assert missing == []
    assert {*answer_shapes.EXACTLY, *answer_shapes.NOT_REQUIRED} - known == set()
