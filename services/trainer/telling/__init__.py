"""How a run reports on itself and its problems: status, reports, alarms, failures, its phase and its end."""
