"""How the code is divided: rooms, the imports between them, sizes and loose types, for any revision of the tree.

It reads source text only and never imports what it measures, so the same definitions hold before and after a move.
"""
