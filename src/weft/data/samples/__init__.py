"""The data sets that ship with weft."""
