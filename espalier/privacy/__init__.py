"""Differential privacy: accounting, budget of a site, noise and sampling."""
