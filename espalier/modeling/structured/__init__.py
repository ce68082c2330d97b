"""Pruned models of another shape: fewer blocks, groups, channels or residual dimensions."""
