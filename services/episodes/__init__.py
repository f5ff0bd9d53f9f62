"""The parts that play an episode, whatever drives it.

``tree`` holds the tokens, ``policy`` samples them, ``outbox`` streams what is finished. Where the environment holds the
loop, ``history`` is the conversation on a tree with one open turn; where an agent does, ``matching``
finds what a request goes on from, and ``snapshots`` keeps what the agent was told.
"""
