"""Tests of the packages, in folders of the same names, and what they share."""
