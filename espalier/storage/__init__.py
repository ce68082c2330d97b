"""Storage on one machine: atomic files, blobs by hash, logs, locks and a node's private state."""
