"""Serving under load: who may start when, how long answers grow, and what a policy would do on other machines."""
