"""The parts that play an episode, whatever drives it.

``policy`` samples, ``outbox`` streams what is finished. Where the environment holds the loop, ``history`` and
``ledger`` hold the conversation and its tokens; where an agent does, ``matching`` finds what a request goes on from,
``tape`` holds the tokens of each branch, and ``snapshots`` keeps them.
"""
