"""What is kept of a run and taken up again: background writing, recovery, replay."""
