"""How a process begins, lives and ends: settings, logs, health, children, cancelling. Imports no other room."""
