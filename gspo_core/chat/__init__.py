"""Chat formats: messages to token ids, and sampled ids to parsed turns, never re-encoding sampled text.

Reading order: ``hermes`` (the Qwen family's format, hand-written), ``turns`` (parses sampled ids),
``template`` (any other model, through its own chat template), ``selection`` (picks the codec for a model).
"""

from gspo_core.chat.hermes import TOOLS_FOOTER, TOOLS_HEADER, HermesCodec
from gspo_core.chat.selection import ChatCodec, UnsuitableChat, load_codec
from gspo_core.chat.template import TemplateCodec, TemplateRefused
from gspo_core.chat.text import NotText
from gspo_core.chat.tokenizer import Tokenizer, UnsuitableTokenizer, load_tokenizer
from gspo_core.chat.turns import LlamaCalls, TaggedCalls, read_glm_xml, read_hermes, read_qwen_xml
from gspo_core.messages import CallStatus, ForkReason, Message, ParsedTurn, ToolCall, ToolSchema

__all__ = [
    "TOOLS_FOOTER",
    "TOOLS_HEADER",
    "CallStatus",
    "ChatCodec",
    "ForkReason",
    "HermesCodec",
    "LlamaCalls",
    "Message",
    "NotText",
    "ParsedTurn",
    "TaggedCalls",
    "TemplateCodec",
    "TemplateRefused",
    "Tokenizer",
    "ToolCall",
    "ToolSchema",
    "UnsuitableChat",
    "UnsuitableTokenizer",
    "load_codec",
    "load_tokenizer",
    "read_glm_xml",
    "read_hermes",
    "read_qwen_xml",
]
