"""An agent that owns its loop and learns the demo's task: see docs/agents.md."""
