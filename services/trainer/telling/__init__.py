"""What a run says of itself and of what goes wrong: status, reports, alarms, failures."""
