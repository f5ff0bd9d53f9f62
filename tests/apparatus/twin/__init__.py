"""Bus and store in memory, for tests of your own: the same methods, the same answers and refusals, no server.

    world = World()
    bus, store = TwinBus(world), TwinStore(world)

Everything that shares a ``World`` is one installation; it lives and ends with the process. The contract suites of the
real ones run on these, and a state machine compares the two step by step.
"""

from tests.apparatus.twin.bus import TwinBus
from tests.apparatus.twin.store import TwinStore
from tests.apparatus.twin.world import World

__all__ = ["TwinBus", "TwinStore", "World"]
