"""The demo's model: one format for codec and template, cheap prompts, lessons as episodes are, a mediocre start."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from environments.calculator import Calculator, evaluate
from examples.demo import demonstrations, model
from examples.demo.demonstrations import MAX_RESULT_DIGITS, NO_MISTAKES, CalculatorMistakes, demonstrate, practise
from examples.demo.model import NotADemoModel, School, make_demo_model
from gspo_core.chat import HermesCodec, Message, load_tokenizer
from gspo_core.env import load_environment
from gspo_core.types import Split
from tests.examples.demo_episodes import causes, play, success


@pytest.fixture(scope="module")
def made_school(tmp_path_factory: pytest.TempPathFactory) -> tuple[School, Path]:
    directory = tmp_path_factory.mktemp("school")
    return School(directory, seed=0), directory


@pytest.fixture(scope="module")
def school(made_school: tuple[School, Path]) -> School:
    return made_school[0]


# --- tokenizer and template -----------------------------------------------------------------------------------------


def random_conversation(generator: random.Random) -> list[Message]:
    """With and without a system message, calls, several results; text with control-like and foreign pieces.

    A control token that is spelt whole is a token to the template and text to the codec (test_chat_control_tokens).
    """
    pieces = ["a", "12", "\n", " ", "ü", "日本", "<tool_call", "/tool_response>", '{"x":', "?", "<b>", "'", "\t"]

    def text() -> str:
        return "".join(generator.choices(pieces, k=generator.randint(0, 8)))

    messages: list[Message] = [{"role": "system", "content": text()}] if generator.random() < 0.5 else []
    for _ in range(generator.randint(1, 3)):
        messages.append({"role": "user", "content": text()})
        for _ in range(generator.randint(0, 2)):
            calls = [
                {"type": "function", "function": {"name": "f", "arguments": {"e": text(), "n": generator.random()}}}
                for _ in range(generator.randint(1, 3))
            ]
            messages.append({"role": "assistant", "content": text(), "tool_calls": calls})
            messages += [{"role": "tool", "content": text()} for _ in range(generator.randint(1, 3))]
        messages.append({"role": "assistant", "content": text()})
    return messages


def test_the_chat_template_gives_the_ids_of_the_codec(made_school: tuple[School, Path]) -> None:
    from transformers import AutoTokenizer

    school, directory = made_school
    backend = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    tool = {"name": "ca«", "description": "a <b>&'\" ü", "parameters": {"type": "object", "properties": {}}}
    generator = random.Random(0)
    for _ in range(200):
        messages = random_conversation(generator)
        tools = [{"type": "function", "function": tool}] * generator.randint(0, 2)
        prompt = generator.random() < 0.5
        expected = backend.apply_chat_template(
            messages, tools=tools or None, add_generation_prompt=prompt, tokenize=True, return_dict=False
        )
        assert school.codec.render(messages, tools, generation_prompt=prompt) == expected


async def test_a_prompt_is_cheap_and_every_digit_is_a_token_of_its_own(school: School) -> None:
    environment = load_environment(demonstrations.COURSE.environment)
    lengths = []
    for index in range(50):
        session = environment.session()
        start = await session.start(await environment.task(Split.EVAL, index), 0)
        await session.close()
        lengths.append(len(school.codec.render(start.messages, start.tools)))
    assert max(lengths) <= 80
    tokenizer = school.codec.tokenizer
    assert tokenizer.vocab_size <= 640
    assert [tokenizer.decode([token]) for token in tokenizer.encode("3071")] == list("3071")
    spelt = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    assert not [token for token in spelt if len(token) > 1 and any(character.isdigit() for character in token)]


# --- lessons --------------------------------------------------------------------------------------------------------


def test_a_faultless_demonstration_asks_for_the_question_and_says_what_it_read() -> None:
    generator = random.Random(0)
    for task in Calculator.tasks[:50]:
        called, result, answer = demonstrate(task["expression"], NO_MISTAKES, generator)
        assert called["tool_calls"][0]["function"]["arguments"] == {"expression": task["expression"]}
        assert result["content"] == answer["content"] == str(evaluate(task["expression"]))


def test_practice_copies_results_of_every_length_alone_and_in_words() -> None:
    generator = random.Random(0)
    lengths: set[int] = set()
    in_words: set[bool] = set()
    for task in Calculator.tasks[:200]:
        called, result, answer = practise(task["expression"], generator)
        assert called["tool_calls"][0]["function"]["arguments"] == {"expression": task["expression"]}
        assert answer["content"] in (result["content"], f"It is {result['content']}.")
        lengths.add(len(result["content"].removeprefix("-")))
        in_words.add(answer["content"] != result["content"])
    assert lengths == set(range(1, MAX_RESULT_DIGITS + 1))
    assert max(len(str(abs(evaluate(task["expression"])))) for task in Calculator.tasks) == MAX_RESULT_DIGITS
    assert in_words == {False, True}


@pytest.mark.parametrize("mistake", ["guess", "malformed", "shortened", "talkative", "slip"])
def test_every_mistake_is_shown_as_often_as_it_says(mistake: str) -> None:
    generator = random.Random(0)
    mistakes = CalculatorMistakes(**{name: float(name == mistake) for name in CalculatorMistakes.__dataclass_fields__})
    for task in Calculator.tasks[:50]:
        expression = task["expression"]
        messages = demonstrate(expression, mistakes, generator)
        calls = [message["tool_calls"][0] for message in messages if message.get("tool_calls")]
        asked = [call["function"]["arguments"]["expression"] for call in calls]
        assert (mistake == "guess") == (len(messages) == 1)
        assert (mistake == "malformed") == (len(messages) == 5)
        assert (mistake == "shortened") == (asked not in ([], [expression]))
        if mistake in ("talkative", "slip"):
            assert messages[-1]["content"] != messages[-2]["content"] == str(evaluate(expression))
            assert (mistake == "talkative") == (messages[-2]["content"] in messages[-1]["content"])


async def test_a_broken_call_of_a_demonstration_is_one_that_the_codec_cannot_read(school: School) -> None:
    environment = load_environment(demonstrations.COURSE.environment)
    mistakes = dataclasses.replace(NO_MISTAKES, malformed=1.0)
    for task in Calculator.tasks[:20]:
        broken, told, *_ = demonstrate(task["expression"], mistakes, random.Random(0))
        sampled = [*school.codec.tokenizer.encode_whole(broken["content"]), school.codec.stop_ids[0]]
        session = environment.session()
        await session.start(task, 0)
        observation = await session.act(school.codec.parse(sampled))
        await session.close()
        assert [message["content"] for message in observation.messages] == [told["content"]]


def test_lessons_train_what_a_policy_would_sample_and_nothing_else(school: School) -> None:
    codec = school.codec
    for lesson in [*school.practice(20, whole=False), *school.practice(20), *school.lessons(40, CalculatorMistakes())]:
        ids, mask = lesson.token_ids.tolist(), lesson.action_mask.tolist()
        text = codec.tokenizer.decode(ids)
        turns = [part.split("<|im_end|>")[0] for part in text.split("<|im_start|>assistant\n")[1:]]
        sampled = codec.tokenizer.decode([token for token, action in zip(ids, mask, strict=True) if action])
        assert sampled == "".join(f"{turn}<|im_end|>" for turn in turns)
        assert mask[-1]
    whole = codec.tokenizer.decode(school.lessons(1, CalculatorMistakes())[0].token_ids.tolist())
    assert whole.startswith("<|im_start|>system\nUse the calculator.")


def test_lessons_follow_from_the_seed(tmp_path: Path) -> None:
    def digest(seed: int, name: str) -> str:
        directory = tmp_path / name
        lessons = School(directory, seed).lessons(20, CalculatorMistakes())
        content = b"".join(lesson.token_ids.tobytes() for lesson in lessons)
        return hashlib.sha256(content + (directory / "tokenizer.json").read_bytes()).hexdigest()

    assert digest(1, "a") == digest(1, "b") != digest(2, "c")


def test_held_out_tasks_are_never_shown(school: School) -> None:
    held_out = {f"What is {task['expression']}?" for task in Calculator.eval_tasks}
    for lesson in school.practice(2000, whole=False):
        text = school.codec.tokenizer.decode(lesson.token_ids.tolist())
        assert text.split("<|im_end|>")[0].removeprefix("<|im_start|>user\n") not in held_out


# --- the directory --------------------------------------------------------------------------------------------------


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The making itself is replaced: these tests are about the directory. Collects the seeds."""
    seeds: list[int] = []

    def make(made: Path, untrained: Path, seed: int, taught: Any, say: Any) -> None:
        seeds.append(seed)
        if seed == 13:
            made.mkdir()
            raise KeyboardInterrupt
        made.mkdir()
        (made / "model.safetensors").write_text(str(seed))

    monkeypatch.setattr(model, "_make", make)
    return seeds


def silent(text: str) -> None: ...


def test_a_second_call_returns_at_once_and_another_recipe_makes_anew(
    tmp_path: Path, cheap: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "models" / "demo"
    make_demo_model(directory, 1, say=silent)
    make_demo_model(directory, 1, say=silent)
    assert cheap == [1]
    make_demo_model(directory, 2, say=silent)
    assert (directory / "model.safetensors").read_text() == "2"
    monkeypatch.setattr(model, "_recipe", lambda taught: "another")
    make_demo_model(directory, 2, say=silent)
    assert cheap == [1, 2, 2]
    assert [path.name for path in directory.parent.iterdir()] == ["demo"]


def test_an_interrupted_making_leaves_what_was_there(tmp_path: Path, cheap: list[int]) -> None:
    directory = tmp_path / "demo"
    with pytest.raises(KeyboardInterrupt):
        make_demo_model(directory, 13, say=silent)
    assert not list(tmp_path.iterdir())
    make_demo_model(directory, 1, say=silent)
    with pytest.raises(KeyboardInterrupt):
        make_demo_model(directory, 13, say=silent)
    assert (directory / "model.safetensors").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


@pytest.mark.parametrize("content", [None, "[]", '{"made_by": "someone"}', "not json"])
def test_a_directory_of_somebody_else_is_not_replaced(tmp_path: Path, cheap: list[int], content: str | None) -> None:
    (tmp_path / "config.json").write_text("{}")
    if content is not None:
        (tmp_path / model.STAMP_FILE).write_text(content)
    with pytest.raises(NotADemoModel, match="is not a demo model"):
        make_demo_model(tmp_path, say=silent)
    assert model.main([str(tmp_path)]) == 1
    assert not cheap
    assert (tmp_path / "config.json").exists()


@pytest.mark.timeout(600)
def test_a_start_that_does_not_learn_to_copy_is_given_up_for_another_and_the_last_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(model, "WARMUP_STEPS", 1)
    short = dataclasses.replace(demonstrations.COURSE, num_practice=2, num_whole=1, num_noisy=1, exam_step=2)
    weights = {}
    for name, exam_loss in (("strict", 0.0), ("lenient", 100.0)):
        said: list[str] = []
        make_demo_model(tmp_path / name, 0, taught=dataclasses.replace(short, exam_loss=exam_loss), say=said.append)
        assert sum("another random start" in line for line in said) == (name == "strict")
        weights[name] = (tmp_path / name / "model.safetensors").read_bytes()
    assert weights["strict"] != weights["lenient"]


# --- the real thing -------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_the_model_begins_mediocre_and_has_what_it_takes(tmp_path: Path) -> None:
    """15 to 45 % of held-out tasks, every mistake present; clean lessons soon mend it."""
    from gspo_core.learner import Learner
    from gspo_core.learner_config import LearnerConfig, OptimizerConfig
    from gspo_core.objective_config import ObjectiveConfig

    directory = tmp_path / "demo"
    said: list[str] = []
    make_demo_model(directory, 0, say=said.append)
    assert len(said) > 5
    begun = await play(directory, split=Split.EVAL, count=200, temperature=1.0, seed=0)
    print(f"begins with {success(begun):.1%}: {dict(causes(begun))}")
    assert 0.15 <= success(begun) <= 0.45
    assert all(causes(begun)[cause] >= 2 for cause in ("guessed", "wrong expression", "wrong answer"))
    assert sum(episode.num_sampled for episode in begun) / len(begun) <= 40
    assert max(len(episode.token_ids) for episode in begun) <= 256

    learner = Learner(directory, LearnerConfig(optimizer=OptimizerConfig(lr=5e-4)), ObjectiveConfig(), seed=0)
    school = School(tmp_path / "school", seed=0)
    assert (tmp_path / "school" / "tokenizer.json").read_bytes() == (directory / "tokenizer.json").read_bytes()
    for _ in range(30):
        learner.supervised_step(school.lessons(32, NO_MISTAKES))
    learner.save_weights(tmp_path / "mended")
    mended = await play(tmp_path / "mended", split=Split.EVAL, count=200, temperature=1.0, seed=0)
    print(f"after 30 clean steps {success(mended):.1%}: {dict(causes(mended))}")
    # What the demo is to show must be within reach.
    assert success(mended) >= success(begun) + 0.4


@pytest.mark.timeout(600)
def test_the_same_seed_gives_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "WARMUP_STEPS", 2)
    short = dataclasses.replace(demonstrations.COURSE, num_practice=3, num_whole=2, num_noisy=2)

    def digests(seed: int, name: str) -> dict[str, str]:
        make_demo_model(tmp_path / name, seed, taught=short, say=silent)
        paths = sorted((tmp_path / name).iterdir())
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}

    first = digests(0, "a")
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} < set(first)
    assert {"tokenizer_config.json", "chat_template.jinja", model.STAMP_FILE} < set(first)
    assert digests(0, "b") == first
    assert digests(1, "c")["model.safetensors"] != first["model.safetensors"]
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    codec = HermesCodec(load_tokenizer(tmp_path / "a"))
    assert config["vocab_size"] == codec.tokenizer.vocab_size
    assert config["eos_token_id"] == codec.stop_ids[0]
