"""What agents may send in each dialect, field by field, and what becomes of it: the one table.

Rule: a field stands here as acted on (``READ``), as decided by the job (``Decided``: the answer names it in the header
``x-gspo-ignored``), as harmless, or as allowed only where it says what happens anyway (``Only``). A field that does not
stand here is refused; where a job has such fields said (``unsupported: say``), the header names them, if they belong
neither to the conversation nor to what an answer is of no use without.
"""

from __future__ import annotations

from gspo_core.json_value import JSON
from services.gateway.dialects.sent import Decided, Fields, Harmless, Only, Read, Rule

READ, HARMLESS = Read(), Harmless()
NO_FORMAT = "asks for a form of answer that sampling is not held to here: ask for it in words, and leave this out"
NO_STORE = "cannot be asked for: no answer is kept for a later request; send the whole conversation each time"
NO_LOGPROBS = "cannot be asked for: log-probs are recorded for training, and are not given out"
NO_BIAS = "would change what is sampled: the job's own distribution is the one that is trained"
NO_OTHER_MEDIA = "cannot be acted on: the policy reads and writes text only"
NO_OLD_CALLS = "is the old way to offer functions: use tools"
NO_SERVER_TOOLS = "asks for a tool that runs at the provider: there is none here"
NO_EXTRA_WORDS = "cannot be shown to the policy: say it in the description"
NO_CONTEXT_EDITS = "cannot be asked for: the conversation is taken as it is sent; shorten it yourself"

# How tokens are sampled is the job's: the recorded distribution must be the policy's.
_SAMPLING: dict[str, Rule] = {
    "temperature": Decided(),
    "top_p": Decided(),
    "top_k": Decided(),
    "min_p": Decided(),
    "frequency_penalty": Decided(0),
    "presence_penalty": Decided(0),
    "repetition_penalty": Decided(1),
    "reasoning_effort": Decided(),
    "verbosity": Decided(),
}
# The job decides the distribution; this picks the sample.
_CHOSEN: dict[str, Rule] = {"seed": READ}
# Who asks, what for, and how a provider may keep, bill or serve it.
_BOOKKEEPING: dict[str, Rule] = {
    "user": HARMLESS,
    "metadata": HARMLESS,
    "safety_identifier": HARMLESS,
    "prompt_cache_key": HARMLESS,
    "prompt_cache_options": HARMLESS,
    "prompt_cache_retention": HARMLESS,
    "service_tier": HARMLESS,
}
_TEXT_PART: dict[str, Rule] = {
    "type": READ,
    "text": READ,
    "cache_control": HARMLESS,
    "prompt_cache_breakpoint": HARMLESS,
    "annotations": HARMLESS,
    "citations": HARMLESS,
    "logprobs": HARMLESS,
}

OPENAI_CHAT: Fields = {
    "": {
        **_SAMPLING,
        **_CHOSEN,
        **_BOOKKEEPING,
        "model": READ,
        "messages": READ,
        "tools": READ,
        "max_tokens": READ,
        "max_completion_tokens": READ,
        "stop": READ,
        "stream": READ,
        "stream_options": READ,
        "prediction": HARMLESS,
        "n": Only(1, why="must be 1: ask again for another answer"),
        "response_format": Only({"type": "text"}, why=NO_FORMAT),
        "tool_choice": READ,
        "parallel_tool_calls": READ,
        "store": Only(False, why=NO_STORE),
        "logprobs": Only(False, why=NO_LOGPROBS),
        "top_logprobs": Only(0, why=NO_LOGPROBS),
        "logit_bias": Only({}, why=NO_BIAS),
        "modalities": Only(["text"], why=NO_OTHER_MEDIA),
        "audio": Only(why=NO_OTHER_MEDIA),
        "functions": Only(why=NO_OLD_CALLS, is_vital=True),
        "function_call": Only(why=NO_OLD_CALLS, is_vital=True),
        "web_search_options": Only(why=NO_SERVER_TOOLS),
        "moderation": Only(why=NO_SERVER_TOOLS),
    },
    "tool_choice": {"type": READ, "function": READ, "custom": READ},
    "tool_choice.function": {"name": READ},
    "tool_choice.custom": {"name": READ},
    "stream_options": {"include_usage": READ, "include_obfuscation": HARMLESS},
    "messages[]": {
        "role": READ,
        "content": READ,
        "name": READ,
        "tool_calls": READ,
        "tool_call_id": READ,
        "reasoning": READ,
        "reasoning_content": READ,
        "reasoning_details": READ,
        "annotations": HARMLESS,
        "refusal": Only("", why="cannot be in the history: no answer here is a refusal"),
        "audio": Only(why=NO_OTHER_MEDIA),
        "function_call": Only(why=NO_OLD_CALLS),
    },
    "messages[].content[]": _TEXT_PART,
    "messages[].reasoning_details[]": {
        "type": READ,
        "text": READ,
        "id": HARMLESS,
        "format": HARMLESS,
        "index": HARMLESS,
    },
    "messages[].tool_calls[]": {"id": READ, "type": READ, "function": READ, "custom": READ, "index": HARMLESS},
    "messages[].tool_calls[].custom": {"name": READ, "input": READ},
    "messages[].tool_calls[].function": {"name": READ, "arguments": READ},
    "tools[]": {"type": READ, "function": READ, "custom": READ, "cache_control": HARMLESS},
    "tools[].custom": {"name": READ, "description": READ, "format": READ},
    "tools[].function": {"name": READ, "description": READ, "parameters": READ, "strict": Decided(False)},
}

_RESPONSES_TOOL: dict[str, Rule] = {
    "type": READ,
    "name": READ,
    "description": READ,
    "parameters": READ,
    "format": READ,
    "strict": Decided(False),
    "output_schema": Only(why=NO_EXTRA_WORDS),
    "defer_loading": Only(False, why=NO_SERVER_TOOLS),
    "allowed_callers": Only(["direct"], why=NO_SERVER_TOOLS),
    "async": Only(False, why="cannot be acted on: a call is answered before the next turn"),
}

OPENAI_RESPONSES: Fields = {
    "": {
        **_SAMPLING,
        **_CHOSEN,
        **_BOOKKEEPING,
        "model": READ,
        "input": READ,
        "instructions": READ,
        "tools": READ,
        "max_output_tokens": READ,
        "stream": READ,
        "text": READ,
        "reasoning": Decided(),
        "client_metadata": HARMLESS,
        "stream_options": HARMLESS,
        # It counts calls of tools that run at the provider.
        "max_tool_calls": HARMLESS,
        "include": Only([], ["reasoning.encrypted_content"], why="asks for data that no answer here has"),
        "tool_choice": READ,
        "parallel_tool_calls": READ,
        "store": Only(False, why=NO_STORE),
        "background": Only(False, why=NO_STORE, is_vital=True),
        "background_options": Only(why=NO_STORE, is_vital=True),
        "previous_response_id": Only(why=NO_STORE, is_vital=True),
        "conversation": Only(why=NO_STORE, is_vital=True),
        "prompt": Only(why=NO_STORE, is_vital=True),
        "context_management": Only([], why=NO_CONTEXT_EDITS),
        "truncation": Only("disabled", why=NO_CONTEXT_EDITS),
        "top_logprobs": Only(0, why=NO_LOGPROBS),
        "moderation": Only(why=NO_SERVER_TOOLS),
        "access_programs": Only(why=NO_SERVER_TOOLS),
        "image": Only(why=NO_OTHER_MEDIA),
    },
    "tool_choice": {"type": READ, "name": READ},
    "text": {"format": Only({"type": "text"}, why=NO_FORMAT), "verbosity": Decided()},
    "input[]": {
        "type": READ,
        "role": READ,
        "content": READ,
        "call_id": READ,
        "name": READ,
        "arguments": READ,
        "input": READ,
        "output": READ,
        "summary": READ,
        "id": HARMLESS,
        "status": HARMLESS,
        "phase": HARMLESS,
        "encrypted_content": HARMLESS,
        "caller": Only({"type": "direct"}, why=NO_SERVER_TOOLS),
        "namespace": READ,
        "async": Only(False, why="cannot be acted on: a call is answered before the next turn"),
    },
    "input[].content[]": _TEXT_PART,
    "input[].output[]": _TEXT_PART,
    "input[].summary[]": _TEXT_PART,
    "tools[]": {**_RESPONSES_TOOL, "tools": READ},
    "tools[].tools[]": _RESPONSES_TOOL,
}

# Claude Code asks for it: nothing is cleared.
_KEEPS_ALL_THINKING: JSON = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
ANTHROPIC_MESSAGES: Fields = {
    "": {
        **_SAMPLING,
        **_CHOSEN,
        "model": READ,
        "messages": READ,
        "system": READ,
        "tools": READ,
        "max_tokens": READ,
        "stop_sequences": READ,
        "stream": READ,
        "output_config": READ,
        "thinking": Decided(),
        "metadata": HARMLESS,
        "cache_control": HARMLESS,
        "diagnostics": HARMLESS,
        "inference_geo": HARMLESS,
        "service_tier": HARMLESS,
        "speed": HARMLESS,
        "user_profile_id": HARMLESS,
        "workspace_id": HARMLESS,
        "tool_choice": READ,
        "container": Only(why=NO_SERVER_TOOLS),
        "mcp_servers": Only([], why=NO_SERVER_TOOLS),
        "context_management": Only({"edits": []}, _KEEPS_ALL_THINKING, why=NO_CONTEXT_EDITS),
    },
    "tool_choice": {
        "type": READ,
        "name": READ,
        "disable_parallel_tool_use": READ,
    },
    "output_config": {"effort": Decided(), "format": Only(why=NO_FORMAT)},
    "system[]": _TEXT_PART,
    "messages[]": {"role": READ, "content": READ},
    "messages[].content[]": {
        **_TEXT_PART,
        "id": READ,
        "name": READ,
        "input": READ,
        "tool_use_id": READ,
        "content": READ,
        "thinking": READ,
        "signature": HARMLESS,
        # The text of the result says so too.
        "is_error": Decided(False),
        "caller": Only({"type": "direct"}, why=NO_SERVER_TOOLS),
        "toolset_name": Only(why=NO_SERVER_TOOLS),
    },
    "messages[].content[].content[]": _TEXT_PART,
    "tools[]": {
        "name": READ,
        "description": READ,
        "input_schema": READ,
        "type": READ,
        "strict": Decided(False),
        "cache_control": HARMLESS,
        "eager_input_streaming": HARMLESS,
        "defer_loading": Only(False, why=NO_SERVER_TOOLS),
        "allowed_callers": Only(["direct"], why=NO_SERVER_TOOLS),
        "input_examples": Only([], why=NO_EXTRA_WORDS),
    },
}
_GEMINI_TEXT_PART: dict[str, Rule] = {
    "text": READ,
    "thoughtSignature": HARMLESS,
    "partMetadata": HARMLESS,
    "inlineData": Only(why=NO_OTHER_MEDIA),
    "fileData": Only(why=NO_OTHER_MEDIA),
    "videoMetadata": Only(why=NO_OTHER_MEDIA),
    "mediaResolution": HARMLESS,
}
GEMINI: Fields = {
    "": {
        # The path says these two.
        "model": READ,
        "stream": READ,
        "contents": READ,
        "systemInstruction": READ,
        "tools": READ,
        "toolConfig": READ,
        "generationConfig": READ,
        "safetySettings": HARMLESS,
        "labels": HARMLESS,
        "serviceTier": HARMLESS,
        "store": HARMLESS,
        "cachedContent": Only(why=NO_STORE, is_vital=True),
    },
    "systemInstruction": {"role": HARMLESS, "parts": READ},
    "systemInstruction.parts[]": _GEMINI_TEXT_PART,
    "contents[]": {"role": READ, "parts": READ},
    "contents[].parts[]": {
        **_GEMINI_TEXT_PART,
        "thought": READ,
        "functionCall": READ,
        "functionResponse": READ,
        "executableCode": Only(why=NO_SERVER_TOOLS),
        "codeExecutionResult": Only(why=NO_SERVER_TOOLS),
        "toolCall": Only(why=NO_SERVER_TOOLS),
        "toolResponse": Only(why=NO_SERVER_TOOLS),
    },
    "contents[].parts[].functionCall": {
        "id": READ,
        "name": READ,
        "args": READ,
        "partialArgs": Only(why="cannot be in the history: send the call whole"),
        "willContinue": Only(False, why="cannot be in the history: send the call whole"),
    },
    "contents[].parts[].functionResponse": {
        "id": READ,
        "name": READ,
        "response": READ,
        "parts": Only([], why=NO_OTHER_MEDIA),
        "scheduling": HARMLESS,
        "willContinue": Only(False, why="cannot be acted on: a call is answered before the next turn"),
    },
    "tools[]": {
        "functionDeclarations": READ,
        # They run at the provider.
        **dict.fromkeys(
            (
                *("googleSearch", "googleSearchRetrieval", "urlContext", "codeExecution", "googleMaps", "fileSearch"),
                *("computerUse", "enterpriseWebSearch", "retrieval", "mcpServers", "exaAiSearch", "parallelAiSearch"),
            ),
            Decided(),
        ),
    },
    "tools[].functionDeclarations[]": {
        "name": READ,
        "description": READ,
        "parameters": READ,
        "parametersJsonSchema": READ,
        # What a function returns, which Google's package makes of each that it is given; the policy is not shown it.
        "response": Decided(),
        "responseJsonSchema": Decided(),
        "behavior": Only("BLOCKING", "UNSPECIFIED", why="cannot be acted on: a call is answered before the next turn"),
    },
    "toolConfig": {
        "functionCallingConfig": READ,
        "retrievalConfig": HARMLESS,
        "includeServerSideToolInvocations": HARMLESS,
    },
    "toolConfig.functionCallingConfig": {
        "mode": READ,
        "allowedFunctionNames": READ,
        "streamFunctionCallArguments": Only(False, why="cannot be asked for: a call is told when it is whole"),
    },
    "generationConfig": {
        "maxOutputTokens": READ,
        "stopSequences": READ,
        "seed": READ,
        "temperature": Decided(),
        "topP": Decided(),
        "topK": Decided(),
        "presencePenalty": Decided(0),
        "frequencyPenalty": Decided(0),
        "thinkingConfig": Decided(),
        "mediaResolution": HARMLESS,
        "enableEnhancedCivicAnswers": HARMLESS,
        "candidateCount": Only(1, why="must be 1: ask again for another answer"),
        "responseMimeType": Only("text/plain", why=NO_FORMAT),
        "responseSchema": Only(why=NO_FORMAT),
        "responseJsonSchema": Only(why=NO_FORMAT),
        "responseFormat": Only(why=NO_FORMAT),
        "responseModalities": Only(["TEXT"], [], why=NO_OTHER_MEDIA),
        "speechConfig": Only(why=NO_OTHER_MEDIA),
        "imageConfig": Only(why=NO_OTHER_MEDIA),
        "responseLogprobs": Only(False, why=NO_LOGPROBS),
        "logprobs": Only(0, why=NO_LOGPROBS),
    },
}
# The gateway's own request: the reward of an episode.
EPISODE: Fields = {"": {"reward": READ, "turn": READ, "token": READ}}
# A gateway tells another whether its client has an answer.
RECEIPT: Fields = {"": {"turn": READ, "delivered": READ}}
