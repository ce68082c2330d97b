"""Cryptography of secure sums: keys, shares, masks and the graph of neighbours."""
