"""Chat formats: messages to token ids, and sampled ids to parsed turns, so that nothing sampled is encoded again.

Read in this order: ``hermes`` (the format of the Qwen family, written out), ``turns`` and ``calls`` (reading what was
sampled), ``template`` (any other model, over its own chat template), ``selection`` (which codec a model gets).
"""

from gspo_core.chat.calls import LlamaCalls, TaggedCalls, read_hermes, read_qwen_xml
from gspo_core.chat.hermes import TOOLS_FOOTER, TOOLS_HEADER, HermesCodec
from gspo_core.chat.jinja import TemplateRefused
from gspo_core.chat.selection import ChatCodec, UnsuitableChat, load_codec
from gspo_core.chat.template import TemplateCodec
from gspo_core.chat.tokenizer import Tokenizer, UnsuitableTokenizer, load_tokenizer
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
    "read_hermes",
    "read_qwen_xml",
]
