"""The whole stack on one machine, and the demo that shows it learning."""
