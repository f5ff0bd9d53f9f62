"""Programs that use the service as an outsider would."""
