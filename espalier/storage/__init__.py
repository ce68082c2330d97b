"""What stays on a machine: atomic files, blobs by hash, a node's private state."""
