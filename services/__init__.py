"""The processes and the rooms that they share, each a folder: docs/architecture.md has what may import what."""
