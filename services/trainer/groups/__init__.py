"""The path of a group into a batch: admission, intake, selection, sequences."""
