"""Quantised copies of the text model's weights: fewer bytes a decode step, always labelled lossy."""
