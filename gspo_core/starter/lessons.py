"""Conversations as lessons: the ids that a policy would read and sample, which of them are its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gspo_core.chat import HermesCodec, Message
from gspo_core.messages import ToolSchema

if TYPE_CHECKING:
    from gspo_core.batch import TrainSequence


def lesson(
    codec: HermesCodec, prompt: Sequence[Message], said: Sequence[Message], tools: Sequence[ToolSchema] = ()
) -> TrainSequence:
    """``said``: what follows the prompt, the assistant's turns and what it was answered."""
    import numpy as np

    from gspo_core.batch import TrainSequence

    token_ids = codec.render(prompt, tools) if tools else codec.render(prompt)
    action_mask = [False] * len(token_ids)
    observed: list[Message] = []
    for message in said:
        if message["role"] != "assistant":
            observed.append(message)
            continue
        if observed:
            bridge = codec.bridge(token_ids, [codec.stop_ids[0]], observed)
            assert isinstance(bridge, list)
            token_ids += bridge
            action_mask += [False] * len(bridge)
            observed = []
        turn = turn_ids(codec, message)
        token_ids += turn
        action_mask += [True] * len(turn)
    return TrainSequence(
        token_ids=np.array(token_ids, np.int32),
        action_mask=np.array(action_mask),
        behavior_logprobs=np.zeros(len(token_ids), np.float32),
        turn_ids=np.zeros(len(token_ids), np.int32),
        staleness=np.zeros(len(token_ids), np.int32),
        advantages=0.0,
    )


def turn_ids(codec: HermesCodec, message: Message) -> list[int]:
    """What a policy would sample to say ``message``, its stop token included."""
    opening = codec.render([])
    closing = codec.tokenizer.encode("\n")
    whole = codec.render([message], generation_prompt=False)
    assert whole[: len(opening)] == opening
    assert whole[-len(closing) :] == closing
    return whole[len(opening) : -len(closing)]
