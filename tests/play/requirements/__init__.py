"""What is required of the gateway that strangers can use, each by a figure of its own, on the whole stack.

Reading order: ``speaker`` (the model that samples), ``place`` (the stack, its jobs, and what agents reach beside it),
``asking`` (a request in any dialect, and what an answer says), then a module for each requirement, in which what is
drawn and what has to come of it is computed apart from what is played; ``figures`` (what was found, and its page).
"""
