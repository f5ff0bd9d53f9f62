"""Built-in worlds, written exactly as a user would write a plug-in."""
