"""Specification files: three formats, one meaning, and errors that say where."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from gspo_core.spec import JobSpec
from gspo_core.spec_file import MAX_BYTES, SpecFileError, load_job_spec, toml_text, yaml_text
from gspo_core.strict_json import TextRejected

YAML = """
name: demo
model: Qwen/Qwen3-0.6B
environments:
  - ref: environments.calculator:Calculator
    config: {digits: 2}
  - ref: mine.py:Shop
    weight: 2
optimizer:
  lr: 1e-6
sampling: {temperature: 0.9}
"""
TOML = """
name = "demo"
model = "Qwen/Qwen3-0.6B"

[[environments]]
ref = "environments.calculator:Calculator"
config = { digits = 2 }

[[environments]]
ref = "mine.py:Shop"
weight = 2

[optimizer]
lr = 1e-6

[sampling]
temperature = 0.9
"""
JSON = json.dumps(
    {
        "name": "demo",
        "model": "Qwen/Qwen3-0.6B",
        "environments": [
            {"ref": "environments.calculator:Calculator", "config": {"digits": 2}},
            {"ref": "mine.py:Shop", "weight": 2},
        ],
        "optimizer": {"lr": 1e-6},
        "sampling": {"temperature": 0.9},
    }
)
HEAD = 'model: m\nenvironments: [{ref: "a:B"}]\n'


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else textwrap.dedent(text).lstrip("\n").encode())
    return path


def refusal(folder: Path, name: str, text: str | bytes) -> list[str]:
    """The lines of the error, without the folder."""
    with pytest.raises(SpecFileError) as caught:
        load_job_spec(write(folder, name, text))
    return str(caught.value).replace(f"{folder}/", "").splitlines()


@pytest.mark.parametrize(("name", "text"), [("a.yaml", YAML), ("a.yml", YAML), ("a.toml", TOML), ("a.json", JSON)])
def test_three_formats_say_the_same(tmp_path: Path, name: str, text: str):
    spec = load_job_spec(write(tmp_path, name, text))
    assert spec == JobSpec.model_validate_json(JSON)
    assert spec.optimizer.lr == 1e-6
    assert spec.environments[1].weight == 2


def test_a_json_file_may_begin_with_a_byte_order_mark(tmp_path: Path):
    assert load_job_spec(write(tmp_path, "a.json", b"\xef\xbb\xbf" + JSON.encode())).name == "demo"


# Syntax: file, line and column


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.json", '{"model": "m",\n "environments": [,]}', "a.json:2:19: "),
        ("a.json", '{"model": "m"', "a.json:1:14: "),
        ("a.yaml", "model: m\n x: [1\n", "a.yaml:2:3: "),
        ("a.yaml", "model: [m\n", "a.yaml:2:1: "),
        ("a.toml", 'model = "m"\nsteps = \n', "a.toml:2:9: "),
        ("a.toml", 'model = "m', "a.toml:1:11: "),
    ],
)
def test_syntax_errors_name_line_and_column(tmp_path: Path, name: str, text: str, place: str):
    (line,) = refusal(tmp_path, name, text)
    assert line.startswith(place), line


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("a.json", '{"model": "m",\n\t"steps": 1,\n\t"model": "n"}', "a.json:3:2: "),
        ("a.json", '{"a": [{"model": "m", "model": "n"}]}', "a.json:1:23: "),
        ("a.yaml", "model: m\nsteps: 1\nmodel: n\n", "a.yaml:3:1: "),
        ("a.yaml", "a:\n  b: 1\n  'b': 2\n", "a.yaml:3:3: "),
        ("a.toml", 'model = "m"\nmodel = "n"\n', "a.toml:2:"),
    ],
)
def test_keys_given_twice_are_refused(tmp_path: Path, name: str, text: str, place: str):
    (line,) = refusal(tmp_path, name, text)
    assert line.startswith(place), line


# Validation: file, line of the key, what was meant


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.yaml", YAML + "rolout: {}\n", ["a.yaml:11: rolout is not a field; did you mean rollout?"]),
        (
            "a.yaml",
            YAML.replace("weight:", "wieght:").replace("temperature", "temprature"),
            [
                "a.yaml:7: environments[1].wieght is not a field; did you mean weight?",
                "a.yaml:10: sampling.temprature is not a field; did you mean temperature?",
            ],
        ),
        (
            "a.toml",
            TOML.replace("weight = 2", "weight = -2").replace("lr = 1e-6", "lr = -1"),
            [
                "a.toml:10: environments[1].weight: input should be greater than 0 (it is -2)",
                "a.toml:13: optimizer.lr: input should be greater than or equal to 0 (it is -1)",
            ],
        ),
        (
            "a.json",
            '{\n\t"model": "m",\n\t"environments": [\n\t\t{"ref": "a:B",\n\t\t "weight": "x"}]}',
            [
                "a.json:5: environments[0].weight: input should be a valid number, "
                "unable to parse string as a number (it is 'x')"
            ],
        ),
        ("a.yaml", "environments:\n  - ref: a:B\n", ["a.yaml: model is required"]),
        ("a.yaml", "model: m\nenvironments:\n\n  - weight: 1\n", ["a.yaml:4: environments[0].ref is required"]),
        (
            "a.yaml",
            HEAD + "rollout:\n  group_size: 4\n  on_partial_group: min_viable:5\n",
            ["a.yaml:3: rollout: on_partial_group asks for 5 members, but group_size is 4"],
        ),
        ("a.yaml", "- model: m\n", ["a.yaml: a job must be written as keys and values, not as a list"]),
        ("a.yaml", "", ["a.yaml: a job must be written as keys and values, not as nothing"]),
    ],
)
def test_wrong_values_name_the_line_of_their_key(tmp_path: Path, name: str, text: str, expected: list[str]):
    assert refusal(tmp_path, name, text) == expected


def test_lines_of_toml_are_not_confused_by_what_stands_in_values():
    text = textwrap.dedent(
        '''\
        text = """
        [fake]
        a = 1
        """
        list = [
          "b = 2", # c = 3 ]
          { d = 4 },
        ]
        [x.y]
        'quoted key' = 1
        e.f = '\\'
        g = 5
        [[x.z]]
        h = 1
        [x.z.sub]
        [[x.z]]
        h = 2
        '''
    )
    toml_text.parse(text)
    lines = toml_text.key_lines(text)
    assert lines == {
        ("text",): 1,
        ("list",): 5,
        ("x", "y"): 9,
        ("x", "y", "quoted key"): 10,
        ("x", "y", "e", "f"): 11,
        ("x", "y", "g"): 12,
        ("x", "z"): 13,
        ("x", "z", 0): 13,
        ("x", "z", 0, "h"): 14,
        ("x", "z", 0, "sub"): 15,
        ("x", "z", 1): 16,
        ("x", "z", 1, "h"): 17,
    }


def test_only_a_line_feed_ends_a_line_of_toml() -> None:
    text = 'a = "one\u2028two\x85three"\nb = 1\n'
    toml_text.parse(text)
    assert toml_text.key_lines(text) == {("a",): 1, ("b",): 2}
    with pytest.raises(TextRejected) as caught:
        toml_text.parse('a = "\u2028')
    assert (caught.value.line, caught.value.column) == (1, 7)


# YAML as people mean it


def test_plain_words_of_yaml_are_texts_unless_they_are_numbers():
    read = yaml_text.parse("{a: no, b: 12:30, c: 1e-6, d: 010, e: 2020-01-01, f: yes, g: true, h: ~, i: -3, j: .5}")
    assert read == {
        **{"a": "no", "b": "12:30", "c": 1e-6, "d": 10, "e": "2020-01-01"},
        **{"f": "yes", "g": True, "h": None, "i": -3, "j": 0.5},
    }


def test_yaml_anchors_and_merges_work(tmp_path: Path):
    text = HEAD + "rollout: &r {group_size: 4}\nlimits:\n  <<: {max_turns: 3}\n  max_tool_calls: 2\n"
    spec = load_job_spec(write(tmp_path, "a.yaml", text))
    assert (spec.limits.max_turns, spec.limits.max_tool_calls) == (3, 2)


@pytest.mark.parametrize(
    "text",
    [
        "model: !!python/object/apply:os.system ['true']\n",
        "model: !!python/name:os.system\n",
        "model: !mine x\n",
    ],
)
def test_yaml_tags_construct_nothing(tmp_path: Path, text: str):
    (line,) = refusal(tmp_path, "a.yaml", text)
    assert line.startswith("a.yaml:1:8: could not determine a constructor")


@pytest.mark.parametrize("text", ["model: !!binary aGk=\n", "model: !!set {a}\n", "model: !!timestamp 2020-01-01\n"])
def test_values_that_json_cannot_say_are_refused(tmp_path: Path, text: str):
    (line,) = refusal(tmp_path, "a.yaml", text)
    assert line.startswith("a.yaml: model: a ")
    assert line.endswith("has no meaning here; write it in quotes if it is a string")


def test_dates_of_toml_are_refused(tmp_path: Path):
    (line,) = refusal(tmp_path, "a.toml", "model = 2020-01-01\n")
    assert line == "a.toml: model: a date has no meaning here; write it in quotes if it is a string"


def test_yaml_that_expands_or_contains_itself_ends_in_an_error(tmp_path: Path):
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
    )
    assert refusal(tmp_path, "a.yaml", laughs) == ["a.yaml: holds more than 50000 values"]
    assert "contains itself" in refusal(tmp_path, "b.yaml", "model: &a [*a]\n")[0]


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_nesting_without_end_ends_in_an_error(tmp_path: Path, name: str):
    assert "nested" in refusal(tmp_path, name, "[" * 100_000)[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", HEAD + "steps: .nan\n"),
        ("a.toml", 'model = "m"\nsteps = inf\n'),
        ("a.json", '{"model": "m", "steps": NaN}'),
        ("a.json", '{"model": "m", "steps": 1e999}'),
    ],
)
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, name: str, text: str):
    (line,) = refusal(tmp_path, name, text)
    assert line.startswith(name)
    assert any(word in line for word in ("nan", "inf", "NaN", "1e999"))


def test_keys_of_yaml_that_are_no_texts_are_refused(tmp_path: Path):
    assert "write it in quotes" in refusal(tmp_path, "a.yaml", "1: m\n")[0]


# Files


def test_unknown_endings_and_missing_files_are_named(tmp_path: Path):
    assert "must end in .json, .yaml, .yml or .toml, not in '.txt'" in refusal(tmp_path, "a.txt", "x")[0]
    with pytest.raises(SpecFileError, match=r"nothing\.yaml: No such file"):
        load_job_spec(tmp_path / "nothing.yaml")
    with pytest.raises(SpecFileError, match="directory"):
        load_job_spec(_directory(tmp_path / "d.yaml"))


def _directory(path: Path) -> Path:
    path.mkdir()
    return path


def test_files_that_are_no_text_are_refused(tmp_path: Path):
    assert refusal(tmp_path, "a.yaml", b"model: m\nname: \xff\n") == ["a.yaml:2: not UTF-8"]
    assert "larger than" in refusal(tmp_path, "a.yaml", b" " * (MAX_BYTES + 1))[0]
