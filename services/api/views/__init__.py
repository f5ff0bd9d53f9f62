"""How stored things are shown: checkpoints, episodes, transcripts, history, exports."""
