"""`weft serve`: models behind HTTP, with batches that requests share."""
