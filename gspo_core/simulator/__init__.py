"""The whole queue without tokens: what throughput and staleness given settings lead to, in seconds instead of days.

    from gspo_core.simulator import Faults, Lengths, SimulationSetting, simulate
    report = simulate(SimulationSetting(max_staleness=4, lengths=Lengths(p99_over_p50=33)), seed=0)

The rule kept here: every decision about groups is made by the functions of ``gspo_core.staleness`` that the trainer
calls; only engines, episodes and failures are made up. It predicts nothing about learning.
"""

from gspo_core.simulator.report import SimulationReport
from gspo_core.simulator.setting import Faults, Lengths, SimulationSetting
from gspo_core.simulator.simulation import Deadlock, simulate

__all__ = ["Deadlock", "Faults", "Lengths", "SimulationReport", "SimulationSetting", "simulate"]
