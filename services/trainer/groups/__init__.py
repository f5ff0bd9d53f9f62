"""Groups on their way into a batch: admitted, taken in, selected, made into sequences."""
