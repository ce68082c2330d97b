"""Knowledge of Flower beyond its public interface: command lines, grids, tasks of a SuperNode, logs, installed bundles.

Supported are Flower 1.39 to 1.42. No other package imports private parts of Flower; its public interface, ``flwr.app``,
``flwr.serverapp`` and ``flwr.clientapp``, is imported everywhere.
"""
