"""From one format to another, with a report on parity."""
