"""Simulates the whole queue without tokens: predicts throughput and staleness in seconds instead of days.

    from benchmarks.simulator import Faults, Lengths, SimulationSetting, simulate
    report = simulate(SimulationSetting(max_staleness=4, lengths=Lengths(p99_over_p50=33)), seed=0)

Rule: the ``gspo_core.staleness`` functions that the trainer calls make every decision about groups; only engines,
episodes and failures are simulated. It predicts nothing about learning.
"""

from benchmarks.simulator.report import SimulationReport
from benchmarks.simulator.setting import Faults, Lengths, SimulationSetting
from benchmarks.simulator.simulation import Deadlock, simulate

__all__ = ["Deadlock", "Faults", "Lengths", "SimulationReport", "SimulationSetting", "simulate"]
