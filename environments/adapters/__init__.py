"""Other people's worlds as environments, each lazy and with what it needs written in its own file."""
