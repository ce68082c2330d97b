"""Study of FedSpine on a task."""
