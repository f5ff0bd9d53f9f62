"""A tiny model to begin with, for any world: it knows the form of a conversation there, and is mediocre at the rest.

Read in this order: ``tokenizer``, ``lessons`` (messages as what a model is taught), ``playing`` (episodes without a
model), ``untrained`` (random weights in the shape of Qwen3), ``making`` (all of it in a directory), ``command``.
"""
