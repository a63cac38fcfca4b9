"""Analyses of jaxprs that sum up each jaxpr once, however often it is called."""
