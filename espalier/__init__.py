"""What server and clients of Espalier share."""

__version__ = "0.1.0"
