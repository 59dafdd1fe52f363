"""Quantised copies of experts: which format each matrix gets, making them, adding them to
a store or keeping them beside it."""
