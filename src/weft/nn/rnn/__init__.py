"""Recurrent cells and stacks of them."""
