"""An engine without a model, for tests: the default engine protocol with its traps, tokens from a script or a seed, a
clock that a test can turn by hand, faults on order.

It shares no code with the embedded engine on purpose: what both answer alike, a client may rely on. Reading order:
``language`` (what it says and how probable that was), ``engine`` (requests, pauses, weights), ``protocol`` (paths and
bodies), ``transport`` (in a test's own process) and ``__main__`` (over HTTP).
"""

from tests.apparatus.scripted_engine.engine import Fault, ScriptedEngine
from tests.apparatus.scripted_engine.transport import ScriptedTransport

__all__ = ["Fault", "ScriptedEngine", "ScriptedTransport"]
