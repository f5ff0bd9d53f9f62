"""The parts that play an episode, whatever drives it: token ledger, history, outbox, retries."""
