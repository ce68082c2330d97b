"""Code that depends on Flower beyond its public interface.

It covers command lines, grids, tasks and logs of a SuperNode, and installed bundles. Flower 1.39 to
1.42 are supported. No other package imports private parts of Flower. Its public interface
(``flwr.app``, ``flwr.serverapp`` and ``flwr.clientapp``) is imported everywhere.
"""
