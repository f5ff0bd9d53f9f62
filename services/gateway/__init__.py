"""The process that agents talk to: it holds episodes whose loop is theirs, and answers as a model server would."""
