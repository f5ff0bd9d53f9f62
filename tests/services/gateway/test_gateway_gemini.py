"""What Gemini's dialect alone has: paths that say what to do, calls without ids, schemas in capitals, two spellings."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.episodes.fingerprints import of_messages
from services.gateway.dialects.dialect import Heading
from services.gateway.dialects.fields import GEMINI
from services.gateway.dialects.gemini import Gemini, as_json_schema, in_camel_case, path_of
from services.gateway.dialects.turns import Answer, Piece, Refusal, RefusalKind, TurnRequest, Usage
from tests.services.gateway.fake_turns import KEY, FakeTurns, Scripted, serving
from tests.services.gateway.speakers import SPEAKERS, Wire

GOOGLE = {"x-goog-api-key": KEY}
WHOLE = "/v1beta/models/policy:generateContent"
STREAM = "/v1beta/models/policy:streamGenerateContent"
HI: Wire = {"contents": [{"parts": [{"text": "x"}]}]}


def asked(*contents: Wire, **more: Any) -> TurnRequest:
    question = Gemini().read({"model": "policy", "contents": [*contents], **more}, {})
    assert question.unsupported == ()
    return question.ask


def user(*parts: Wire) -> Wire:
    return {"role": "user", "parts": [*parts]}


def model(*parts: Wire) -> Wire:
    return {"role": "model", "parts": [*parts]}


def text(words: str) -> Wire:
    return {"text": words}


def call(name: str, call_id: str | None = None, **args: Any) -> Wire:
    return {"functionCall": {"name": name, "args": args} | ({"id": call_id} if call_id else {})}


def result(name: str, words: Any, call_id: str | None = None) -> Wire:
    made = {"name": name, "response": {"output": words}} | ({"id": call_id} if call_id else {})
    return {"functionResponse": made}


def answered(ask: TurnRequest) -> list[int]:
    """For each result, which call of the message before it it answers."""
    found: list[int] = []
    ids: list[str] = []
    for message in ask.messages:
        ids = [one["id"] for one in message.get("tool_calls", ())] or ids
        found += [ids.index(message["tool_call_id"])] if message["role"] == "tool" else []
    return found


# --- paths


async def test_the_path_names_the_model_and_whether_the_answer_is_a_stream():
    async with serving(FakeTurns([Scripted("one")] * 4)) as gateway:
        whole = await gateway.http.post(WHOLE, json=HI, headers=GOOGLE)
        other = await gateway.http.post("/v1/models/org/gpt:generateContent", json=HI, headers=GOOGLE)
        stream = await gateway.http.post(f"{STREAM}?alt=sse", json=HI, headers=GOOGLE)
    assert whole.json()["candidates"][0]["content"]["parts"] == [{"text": "one"}]
    assert (other.json()["modelVersion"], other.headers["x-gspo-ignored"]) == ("policy", "model")
    assert SPEAKERS["gemini"].read_stream(stream.text).text == "one"


async def test_what_a_path_says_is_not_said_otherwise_and_a_stream_is_events():
    turns = FakeTurns()
    async with serving(turns) as gateway:
        same = await gateway.http.post(WHOLE, json={**HI, "model": "models/policy"}, headers=GOOGLE)
        assert same.status_code == 200
        for path, more, word in (
            (WHOLE, {"model": "models/base"}, "model is not"),
            (WHOLE, {"stream": True}, "stream is not"),
            (STREAM, {}, "alt must be sse"),
            (f"{STREAM}?alt=json", {}, "alt must be sse"),
        ):
            refused = await gateway.http.post(path, json={**HI, **more}, headers=GOOGLE)
            assert (refused.status_code, refused.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
            assert word in refused.json()["error"]["message"]
        for path in ("/v1beta/models/policy:embedContent", "/v1beta/models/policy", "/v1beta/files"):
            missing = await gateway.http.post(path, json=HI, headers=GOOGLE)
            assert (missing.status_code, missing.json()["error"]["status"]) == (404, "NOT_FOUND")
    assert len(turns.asks) == 1


@pytest.mark.parametrize("headers", [{}, GOOGLE])
async def test_a_key_in_the_url_is_refused_with_where_it_belongs(headers: dict[str, str], capsys: Any):
    turns = FakeTurns()
    async with serving(turns) as gateway:
        for method, path in (("POST", WHOLE), ("POST", f"{STREAM}?alt=sse"), ("GET", "/v1beta/models")):
            url = f"{path}{'&' if '?' in path else '?'}key={KEY}"
            refused = await gateway.http.request(method, url, json=HI, headers=headers)
            assert (refused.status_code, refused.json()["error"]["status"]) == (401, "UNAUTHENTICATED")
            assert "x-goog-api-key" in refused.json()["error"]["message"]
    output = capsys.readouterr()
    assert (turns.asks, KEY in output.out + output.err) == ([], False)


async def test_models_are_listed_and_found_in_googles_shape():
    async with serving(FakeTurns()) as gateway:
        listed = (await gateway.http.get("/v1beta/models", headers=GOOGLE)).json()
        shared = (await gateway.http.get("/v1/models", headers=GOOGLE)).json()
        found = await gateway.http.get("/v1beta/models/policy", headers={"authorization": f"Bearer {KEY}"})
        missing = await gateway.http.get("/v1beta/models/gpt", headers=GOOGLE)
    assert [one["name"] for one in listed["models"]] == ["models/policy", "models/base"]
    assert shared == listed
    assert found.json() == listed["models"][0]
    assert (missing.status_code, missing.json()["error"]["status"]) == (404, "NOT_FOUND")


async def test_prompts_are_counted_without_a_turn_also_one_level_deeper():
    turns, path = FakeTurns(), "/v1beta/models/policy:countTokens"
    deeper = {"generateContentRequest": {**HI, "model": "models/policy", "systemInstruction": {"parts": [text("y")]}}}
    async with serving(turns) as gateway:
        flat = await gateway.http.post(path, json=HI, headers=GOOGLE)
        deep = await gateway.http.post(path, json=deeper, headers=GOOGLE)
    assert (flat.json(), deep.json()) == ({"totalTokens": 10}, {"totalTokens": 20})
    assert (turns.asks, turns.num_counted) == ([], 2)


def test_paths_are_logged_without_what_a_client_wrote():
    found = path_of("/v1beta/models/a/b:c:generateContent")
    assert found is not None
    assert (found.model, found.known) == ("a/b:c", "/v1beta/models/{model}:generateContent")
    assert path_of("/v1/models/gpt") is path_of("/v1beta/models/:generateContent") is None


# --- the conversation


def test_results_without_ids_belong_to_calls_by_name_and_order():
    calls = model(call("add", a=1), call("now"), call("add", a=2))
    ask = asked(user(text("x")), calls, user(result("now", "noon"), result("add", "1"), result("add", "2")))
    assert answered(ask) == [1, 0, 2]
    ids = [one["id"] for one in ask.messages[1].get("tool_calls", ())]
    assert len(set(ids)) == 3
    with_ids = model(call("add", "p", a=1), call("now", "q"), call("add", "r", a=2))
    named = user(result("now", "noon", "q"), result("add", "1", "p"), result("add", "2", "r"))
    # Some clients give ids to results of calls that had none.
    foreign = user(result("now", "noon", "f1"), result("add", "1", "f2"), result("add", "2", "f3"))
    for other in (asked(user(text("x")), with_ids, named), asked(user(text("x")), calls, foreign)):
        assert of_messages(other.messages) == of_messages(ask.messages)
    assert asked(user(text("x")), calls, foreign).digest == ask.digest
    # Ids go before order.
    turned = user(result("add", "2", "r"), result("add", "1", "p"), result("now", "noon", "q"))
    assert answered(asked(user(text("x")), with_ids, turned)) == [2, 0, 1]


def test_a_result_that_is_sent_twice_is_left_out_and_named():
    calls, first, second = model(call("add", "p"), call("add", "q")), result("add", "1", "p"), result("add", "2", "q")
    rest = [model(call("add", "r")), user(result("add", "1", "r"))]
    body: Wire = {"model": "policy", "contents": [user(text("x")), calls, user(first, first, second, first), *rest]}
    question = Gemini().read(body, {})
    assert question.ask == asked(user(text("x")), calls, user(first, second), *rest)
    assert question.ignored == ("contents.parts.functionResponse",)
    other = asked(user(text("x")), calls, user(first, result("add", "3", "p"), second))
    assert [one["content"] for one in other.messages[2:]] == ["1", "3", "2"]
    assert answered(other) == [0, 0, 1]


def test_results_may_come_one_by_one_and_under_an_older_role():
    calls = model(call("add", a=1), call("add", a=2))
    whole = asked(user(text("x")), calls, user(result("add", "1"), result("add", "2")))
    single = [{"role": "function", "parts": [result("add", words)]} for words in ("1", "2")]
    assert asked(user(text("x")), calls, *single).digest == whole.digest


def test_an_answer_that_is_kept_in_chunks_is_one_message():
    whole = model({"text": "Hm.", "thought": True}, text("one two"), call("add", "c", a=1))
    chunks = [
        model({"text": "H", "thought": True}),
        model({"text": "m.", "thought": True}, text("one")),
        model(text(" two")),
        model(call("add", "c", a=1) | {"thoughtSignature": "c2ln"}),
        model(text("")),
    ]
    rest = user(result("add", "1", "c"), text("And?"))
    assert asked(user(text("x")), *chunks, rest) == asked(user(text("x")), whole, rest)


def test_a_result_is_told_as_its_text_or_as_json():
    for response, words in (
        ({"output": "a\nb"}, "a\nb"),
        ({"result": [1, None]}, "[1,null]"),
        ({"error": "no"}, '{"error":"no"}'),
        ({"output": "a", "more": 1}, '{"output":"a","more":1}'),
        ({}, "{}"),
    ):
        made = {"functionResponse": {"name": "add", "response": response}}
        assert asked(user(text("x")), model(call("add")), user(made)).messages[-1]["content"] == words


def test_instructions_are_one_message_and_nothing_where_they_are_empty():
    ask = asked(user(text("x")), systemInstruction={"role": "user", "parts": [text("Be "), text("brief.")]})
    assert ask.messages[0] == {"role": "system", "content": "Be brief."}
    assert asked(user(text("x")), systemInstruction={"parts": []}) == asked(user(text("x")))


@pytest.mark.parametrize(
    ("contents", "place"),
    [
        ([], "contents"),
        ([user()], "contents"),
        ([{"role": "robot", "parts": [text("x")]}], "contents[0].role"),
        ([user({})], "contents[0].parts[0]"),
        ([user(text("x")), model(text("y"))], "contents"),
        ([user({"inlineData": {"mimeType": "image/png", "data": ""}})], "contents[0].parts[0].inlineData"),
        ([user({"fileData": {"fileUri": "x"}})], "contents[0].parts[0].fileData"),
        ([user({"text": "x", "thought": True})], "contents[0].parts[0].thought"),
        ([user(call("add"))], "contents[0].parts[0].functionCall"),
        ([model(text("x") | call("add")), user(text("y"))], "contents[0].parts[0].text"),
        ([user(result("add", "1"))], "contents[0].parts[0].functionResponse.name"),
        (
            [model(call("add")), user(result("add", "1"), result("add", "2"))],
            "contents[1].parts[1].functionResponse.name",
        ),
    ],
)
def test_what_is_no_conversation_is_refused_by_its_place(contents: list[Wire], place: str):
    with pytest.raises(Refusal) as refused:
        asked(*contents)
    assert (refused.value.kind, refused.value.param) == (RefusalKind.INVALID, place), refused.value.message


# --- tools

OBJECT: Wire = {"type": "OBJECT", "properties": {"type": {"type": "STRING", "nullable": True}}, "required": ["type"]}


def tools(*functions: Wire) -> list[Wire]:
    return [{"functionDeclarations": [*functions]}]


def test_schemas_are_read_in_both_ways_to_write_them():
    lowered = {
        "type": "object",
        "properties": {"type": {"type": "string", "nullable": True}},
        "required": ["type"],
    }
    assert as_json_schema(OBJECT) == lowered
    several: Wire = {"type": "ARRAY", "items": {"anyOf": [OBJECT, {"type": "INTEGER", "enum": ["INTEGER"]}]}}
    found: Any = as_json_schema(several)
    assert found["items"]["anyOf"] == [lowered, {"type": "integer", "enum": ["INTEGER"]}]
    own = asked(user(text("x")), tools=tools({"name": "add", "parameters": OBJECT}))
    plain = asked(user(text("x")), tools=tools({"name": "add", "parametersJsonSchema": lowered}))
    assert own == plain
    with pytest.raises(Refusal, match="parametersJsonSchema"):
        asked(user(text("x")), tools=tools({"name": "a", "parameters": {}, "parametersJsonSchema": {}}))


def test_tools_of_the_provider_are_left_out_and_named():
    body = {
        **HI,
        "model": "policy",
        "tools": [{"googleSearch": {}}, {"codeExecution": {}, **tools({"name": "add"})[0]}],
    }
    question = Gemini().read(body, {})
    assert [one["function"]["name"] for one in question.ask.tools] == ["add"]
    assert question.ignored == ("tools.googleSearch", "tools.codeExecution")


@pytest.mark.parametrize(
    ("config", "mode", "name"),
    [
        ({}, "auto", ""),
        ({"mode": "AUTO"}, "auto", ""),
        ({"mode": "NONE"}, "none", ""),
        ({"mode": "ANY"}, "required", ""),
        ({"mode": "ANY", "allowedFunctionNames": []}, "required", ""),
        ({"mode": "ANY", "allowedFunctionNames": ["now"]}, "required", "now"),
        ({"mode": "ANY", "allowedFunctionNames": ["now", "add"]}, "required", ""),
        ({"mode": "ANY", "allowedFunctionNames": ["now", "fly"]}, None, "must name one function, or all"),
        ({"mode": "ANY", "allowedFunctionNames": ["fly"]}, None, "none of the tools"),
        ({"mode": "AUTO", "allowedFunctionNames": ["now"]}, None, "the mode ANY alone"),
        ({"mode": "VALIDATED"}, None, "must be AUTO, ANY or NONE"),
    ],
)
def test_calls_are_asked_for_by_one_name_or_all(config: Wire, mode: str | None, name: str):
    more = {"tools": tools({"name": "add"}, {"name": "now"}), "toolConfig": {"functionCallingConfig": config}}
    if mode is None:
        with pytest.raises(Refusal, match=name):
            asked(user(text("x")), **more)
    else:
        choice = asked(user(text("x")), **more).choice
        assert (choice.mode, choice.name) == (mode, name)


# --- spelling


def test_both_spellings_are_one_request_and_what_is_anybodys_stays_as_it_is():
    made = {"function_call": {"name": "add", "args": {"snake_case": 1}}, "thought_signature": "x"}
    snake = asked(
        user(text("x")),
        model(made),
        user({"function_response": {"name": "add", "response": {"output": "1"}}}),
        system_instruction={"parts": [text("y")]},
        generation_config={"max_output_tokens": 3, "stop_sequences": ["z"]},
        tools=[{"function_declarations": [{"name": "add", "parameters_json_schema": {"any_of": 1}}]}],
    )
    camel = asked(
        user(text("x")),
        model(call("add", snake_case=1)),
        user(result("add", "1")),
        systemInstruction={"parts": [text("y")]},
        generationConfig={"maxOutputTokens": 3, "stopSequences": ["z"]},
        tools=tools({"name": "add", "parametersJsonSchema": {"any_of": 1}}),
    )
    assert snake == camel
    assert snake.tools[0]["function"]["parameters"] == {"any_of": 1}
    with pytest.raises(Refusal, match="two spellings"):
        in_camel_case({"tool_config": {}, "toolConfig": {}}, GEMINI)


# --- streams


@given(words=st.text(st.sampled_from("a\u2028\u2029\u0085\n\r"), min_size=1))
def test_no_event_of_a_stream_has_a_line_end_inside_whatever_a_client_takes_for_one(words: str):
    """Google's JavaScript package waits for ever behind U+2028, which JSON may hold as it is."""
    writer = Gemini().writer(Gemini().read({"model": "m", **HI}, {}), Heading("turn-0-0", 7, "m", 1))
    answer = Answer("turn-0-0", words, (), (), "stop", Usage(1, 0, 1), (), 7)
    stream = writer.piece(Piece(words[:1])) + writer.alive() + writer.end(answer)
    for event in filter(None, stream.decode().split("\n\n")):
        assert event.startswith("data: ")
        assert not set(event) & set("\n\r\u2028\u2029")
    assert SPEAKERS["gemini"].read_stream(stream.decode()).text == words
