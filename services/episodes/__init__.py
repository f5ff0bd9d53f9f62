"""What plays an episode, whoever drives it: token ledger, history, outbox, retries."""
